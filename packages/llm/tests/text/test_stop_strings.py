"""Stop strings across borders, against a search in the whole text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_llm.text.stop_strings import StopStringMatcher, StopStringStream

ALPHABET = "ab\n😀"
stops = st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4)
pieces = st.lists(st.text(ALPHABET, max_size=6), max_size=12)


def run(stop_strings: list[str], texts: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    stream = StopStringStream(StopStringMatcher(stop_strings), include_stop_string=include)
    shown = []
    for text in texts:
        shown.append(stream.append(text))
        if stream.matched is not None:
            return shown, stream.matched
    return [*shown, stream.finish()], None


def expected(stop_strings: list[str], text: str, *, include: bool = False) -> tuple[str, str | None]:
    """The stop string that ends first, of several the longest, found by brute force."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stop_strings if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@given(stops, pieces, st.booleans())
@settings(max_examples=400)
def test_the_outcome_equals_a_search_in_the_whole_text_however_it_is_cut(stop_strings, texts, include):
    shown, matched = run(stop_strings, texts, include=include)
    assert ("".join(shown), matched) == expected(stop_strings, "".join(texts), include=include)


@given(stops, pieces)
@settings(max_examples=300)
def test_what_is_held_back_is_exactly_what_may_become_a_stop_string(stop_strings, texts):
    stream = StopStringStream(StopStringMatcher(stop_strings))
    seen = shown = ""
    for text in texts:
        seen += text
        shown += stream.append(text)
        if stream.matched is not None:
            return
        starts = [seen[-size:] for stop in stop_strings for size in range(1, len(stop)) if stop[:size] == seen[-size:]]
        assert len(seen) - len(shown) == max(map(len, starts), default=0)
        assert seen.startswith(shown)


def test_a_stop_string_over_three_pieces_is_found_and_never_shown():
    assert run(["</end>"], ["some <", "/en", "d> more"]) == (["some ", "", ""], "</end>")


def test_what_only_looked_like_a_stop_string_is_shown_as_soon_as_that_is_clear():
    assert run(["STOP"], ["a ST", "x"]) == (["a ", "STx", ""], None)


def test_the_stop_string_is_kept_where_asked_for_and_nothing_is_held_back():
    assert run(["STOP"], ["a ST", "OP b"], include=True) == (["a ST", "OP"], "STOP")


def test_a_shorter_stop_string_inside_the_start_of_a_longer_one_ends_the_text():
    assert run(["abcde", "bc"], ["xab", "cd"]) == (["x", "a"], "bc")


def test_unsearched_text_shows_stop_strings_and_starts_the_search_again():
    stream = StopStringStream(StopStringMatcher(["ab"]))
    assert stream.append_unsearched("xab a") == "xab a"
    assert stream.append("b") == "b"
    assert stream.matched is None


def test_characters_are_visited_once():
    class CountingMatcher(StopStringMatcher):
        num_visits = 0

        def advance(self, state: int, char: str) -> int:
            self.num_visits += 1
            return super().advance(state, char)

    matcher = CountingMatcher(["x" * 1000, "ab" * 400])
    before = matcher.num_visits
    stream = StopStringStream(matcher)
    for _ in range(500):
        stream.append("abx" * 2)
    assert matcher.num_visits - before == 3000
