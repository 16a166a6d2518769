"""The runner without a model does what any model runner must do, and finds a scheduler's mistakes."""

from __future__ import annotations

import pytest

from llmstack_engine_core.testing import EchoModelRunner, EchoOptions, EchoOutput, check_model_runner
from llmstack_types import ModelRunnerConfig, ModelRunnerOutput, NewRequest, SamplingParams, ScheduledRequest
from llmstack_types import SchedulerOutput as Step


def make(options: str = "") -> EchoModelRunner:
    return EchoModelRunner(ModelRunnerConfig(f"echo?{options}", block_size=4))


def new(request_id: str, *token_ids: int, num_prompt_tokens: int | None = None) -> NewRequest:
    return NewRequest(request_id, list(token_ids), num_prompt_tokens or len(token_ids), SamplingParams(seed=0))


def test_the_echo_runner_is_a_model_runner() -> None:
    check_model_runner(make)


def test_a_resumed_request_goes_on_where_it_was() -> None:
    step = Step(1, [new("r", 5, 6, 5, num_prompt_tokens=2)], [ScheduledRequest("r", 0, 3, [0])], [], 3)
    assert make().execute_model(step).result().sampled_token_ids == [[6]]


@pytest.mark.parametrize(("drafts", "sampled"), [([5, 6, 5], [5, 6, 5, 6]), ([5, 9, 5], [5, 6]), ([9], [5])])
def test_drafts_are_accepted_as_far_as_they_are_the_echo(drafts: list[int], sampled: list[int]) -> None:
    row = ScheduledRequest("r", 0, 2 + len(drafts), [0, 1], drafts)
    assert make().execute_model(Step(1, [new("r", 5, 6)], [row], [], 5)).result().sampled_token_ids == [sampled]


@pytest.mark.parametrize(
    ("row", "error"),
    [
        (ScheduledRequest("unknown", 0, 1, [0]), KeyError),
        (ScheduledRequest("r", 0, 0, [0]), ValueError),
        (ScheduledRequest("r", 0, 7, [0, 1]), ValueError),
        (ScheduledRequest("r", 0, 6, [0]), ValueError),
        (ScheduledRequest("r", 0, 1, [0], [2]), ValueError),
        (ScheduledRequest("r", 0, 9, [0, 1], [2, 3, 4]), ValueError),
    ],
)
def test_rows_that_no_runner_could_run_are_refused(row: ScheduledRequest, error: type[Exception]) -> None:
    with pytest.raises(error):
        make().execute_model(Step(1, [new("r", 1, 2, 3, 4, 5, 6)], [row], [], 6))


def test_options_are_read_from_the_model_path() -> None:
    assert EchoOptions.from_model_path("some/model") == EchoOptions()
    options = EchoOptions.from_model_path("some/model?step_delay_s=0.5&fail_at_step=3&load_error=no+such")
    assert options == EchoOptions(step_delay_s=0.5, fail_at_step=3, load_error="no such")
    with pytest.raises(KeyError):
        EchoOptions.from_model_path("m?unknown=1")


class ForgetsChunks(EchoModelRunner):
    """Samples in the middle of a prompt."""

    def execute_model(self, scheduled: Step) -> EchoOutput:
        output = super().execute_model(scheduled).result()
        return EchoOutput(ModelRunnerOutput(output.request_ids, [tokens or [0] for tokens in output.sampled_token_ids]))


def test_a_runner_that_samples_in_the_middle_of_a_prompt_is_found() -> None:
    with pytest.raises(AssertionError, match="reaches its last token"):
        check_model_runner(lambda: ForgetsChunks(ModelRunnerConfig("echo")))
