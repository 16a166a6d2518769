"""The second training: continues from a model folder on stories that begin with the subject of their request."""

from __future__ import annotations

import random
from collections.abc import Sequence

from storyteller_training.batches import DocumentEncoder, Row, pack, paragraph_runs
from storyteller_training.conversations import (
    DEPENDENT,
    NEXT_REQUESTS,
    OPEN_REQUESTS,
    OPENING,
    Turn,
    passages_of,
)
from storyteller_training.corpus import Section
from storyteller_training.loop import TrainingConfig
from storyteller_training.persona import small_talk
from storyteller_training.subject_stories import SubjectStories

SUBJECT_TRAINING = TrainingConfig(
    seed=21,
    num_steps=2800,
    num_decay_steps=1300,
    num_warmup_steps=60,
    short_length=128,
    full_length=512,
    num_full_length_steps=1050,
    num_batch_tokens=1024,
    dropout_pause=(0, 1500),
    learning_rate=7e-4,
    log_every=50,
    save_every=175,
)


class SubjectEpochs:
    """Makes the rows of an epoch: stories on request, stories without a subject, small talk and running text."""

    def __init__(self, sections: Sequence[Section], encoder: DocumentEncoder, scale: float = 1.0) -> None:
        self._sections = list(sections)
        self._encoder = encoder
        self._stories = SubjectStories(sections)
        self.num_stories, self.num_open, self.num_small_talks = (round(n * scale) for n in (5000, 450, 500))
        self.running_text_share = 0.45

    def __call__(self, length: int, seed: int) -> list[Row]:
        """Return the shuffled rows of one epoch."""
        rng = random.Random(seed)
        talks = [self._stories.conversation(rng) for _ in range(self.num_stories)]
        talks += self._open_conversations(rng)
        talks += [[Turn(*small_talk(rng))] for _ in range(self.num_small_talks)]
        documents = [self._encoder.conversation(turns) for turns in talks]
        count = round(self.running_text_share * len(self._sections))
        documents += paragraph_runs(rng.sample(self._sections, count), self._encoder, length, rng)
        rng.shuffle(documents)
        return pack(documents, length + 1)

    def _open_conversations(self, rng: random.Random) -> list[list[Turn]]:
        """Return beginnings of tales as answers to requests without a subject, and how they go on."""
        found: list[list[Turn]] = []
        while len(found) < self.num_open:
            passages = [p for p in passages_of(rng.choice(self._sections), rng, 150, 700) if len(p.text) < 1000]
            for at, passage in enumerate(passages):
                if not OPENING.match(passage.text) and (at or DEPENDENT.match(passage.text)):
                    continue
                turns = [Turn(rng.choice(OPEN_REQUESTS), passage.text)]
                if rng.random() < 0.5 and at + 1 < len(passages):
                    turns.append(Turn(rng.choice(NEXT_REQUESTS), passages[at + 1].text))
                found.append(turns)
        return found[: self.num_open]
