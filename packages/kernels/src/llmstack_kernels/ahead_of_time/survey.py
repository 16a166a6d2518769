"""Compiles the cases of operations and gathers measurements and findings."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from llmstack_kernels.ahead_of_time import collect, gate
from llmstack_kernels.ahead_of_time.case import CompileCase
from llmstack_kernels.ahead_of_time.compile import Compiled, compile_case
from llmstack_kernels.ahead_of_time.measure import Measurements, measure
from llmstack_kernels.ahead_of_time.table import Row
from llmstack_kernels.ahead_of_time.target import Target


@dataclass(slots=True)
class Survey:
    """Result of compiling: a row per compiled kernel, and the findings."""

    rows: list[Row] = field(default_factory=list)
    findings: list[gate.Finding] = field(default_factory=list)

    def add(self, compiled: Compiled, result: Measurements | None) -> None:
        self.findings += gate.findings(compiled, result)
        if result is not None:
            self.rows.append(Row(compiled.op, compiled.case.name, compiled.kernel, compiled.target.arch, result))


def survey(ops: Iterable[str], targets: Sequence[Target], samples_only: bool, say: Callable[[str], None]) -> Survey:
    """Compiles the cases of `ops`, or only their samples, for `targets`; `say` receives the progress."""
    found = Survey()
    for op in ops:
        try:
            cases = collect.cases_of(op)
        except collect.MissingCasesError:
            found.findings.append(gate.Finding(gate.Kind.COVERAGE, op, "nothing compiles its kernels"))
            continue
        found.findings += gate.coverage_findings(op, cases)
        chosen = [case for case in cases if case.is_sample or not samples_only]
        say(f"{op}: {len(chosen)} of {len(cases)} cases")
        survey_cases(found, op, chosen, targets)
    return found


def survey_cases(found: Survey, op: str, cases: Iterable[CompileCase], targets: Sequence[Target]) -> None:
    """Compile `cases` and add them to `found`."""
    # The disassembler takes as long as the compiler; it works beside it.
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        pending: list[tuple[Compiled, Future[Measurements] | None]] = []
        for case in cases:
            for target in targets:
                if target.arch >= case.min_arch:
                    pending += [(compiled, _measured(pool, compiled)) for compiled in compile_case(op, case, target)]
        for compiled, future in pending:
            found.add(compiled, future.result() if future else None)


def _measured(pool: ThreadPoolExecutor, compiled: Compiled) -> Future[Measurements] | None:
    return None if isinstance(compiled.binary, str) else pool.submit(measure, compiled.binary, compiled.target)
