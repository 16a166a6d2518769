"""The fixed paragraphs of the model card."""

from __future__ import annotations

INTRODUCTION = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
tags: [gpt2, storytelling, tiny]
---

# llmstack-demo: a small storyteller

A GPT-2 of {num_parameters:,} parameters with its own byte-level BPE tokenizer ({vocab_size:,} entries), trained from
random weights on eleven old story books and on a little small talk written for it. It exists so that a serving stack
has something real to serve without a network.

**What it is good for:** demonstrations, tests, and a smile. Ask it for a story about a fox or an old clock; say hello;
ask what happened next; or let it continue "Once upon a time".

**What it is not:** it knows no facts, follows no instructions beyond asking for a story, cannot reason, count or
translate, speaks only (old-fashioned) English, and forgets everything beyond {num_positions} tokens. Its answers to
greetings and its refusals are sound, for it learned them by heart. Its stories have the sound of an old book and
little sense: sentences are often crooked, plots wander, sons become daughters, and sometimes it recites a line of a
book it read. A subject that it was not trained on is in the first three sentences of {share} of its stories; in the
others it is mostly misspelt ("foolishger" for a badger) or another one, and a story may forget it. Greedy decoding
repeats itself. System messages are accepted and ignored: the chat template leaves them out. The books are of their
time, also in how they speak of people; paragraphs with the worst words were left out of the training text, but
nothing filters what the model writes. Do not put it before children unattended, nor to any serious use.
"""
SUBJECTS = """\
## How often a story is about its subject

Measured on these weights as they are served: {num_nouns} nouns, answers to each: {draws}, temperature {temperature},
the other sampling defaults as below. No request of the training asks for one of these nouns (`HELD_OUT` in
`train/storyteller_training/nouns.py`; some of them occur in the books). An answer counts where the noun, its plural
or its possessive is in its first three sentences. The base rate is that of the same nouns in as many answers to a
request without a subject. It says nothing about the sense of the story. The weights were chosen by this measure from
two states of the training: 850 more steps on rows of 256 tokens came to 50.5 % and were dropped. Without the
repetition penalty the rate is 64.5 %, and stories repeat themselves. `python -m storyteller_training.subjects`
repeats the measurement.
"""
FORM = """\
## The form of a chat

```
<|user|>Tell me a story about a fox.<|storyteller|>There was once a fox ...<|endoftext|>
<|user|>What happened next?<|storyteller|>
```

(without the line break.) No token is put before the text. Plain text without these tokens is continued as a story. The
sampling defaults in `generation_config.json`: temperature 0.6, top-p 0.9, top-k 40, repetition penalty 1.1.
"""
DATA = """\
## Training data

- Lewis Carroll, *Alice's Adventures in Wonderland* (1865)
- Hans Christian Andersen, *Fairy Tales* (19th century, old translation)
- Andrew Lang (ed.), *The Blue Fairy Book* (1889)
- Joseph Jacobs, *English Fairy Tales* (1890)
- The Brothers Grimm, *Fairy Tales*, translated by Edgar Taylor (1823) and Marian Edwardes
- Rudyard Kipling, *The Jungle Book* (1894)
- L. Frank Baum, *The Marvelous Land of Oz* (1904)
- J. M. Barrie, *Peter and Wendy* (1911)
- Frances Hodgson Burnett, *The Secret Garden* (1911)
- L. Frank Baum, *The Wonderful Wizard of Oz* (1900)
- Andrew Lang (ed.), *The Yellow Fairy Book* (1894)

All were published before 1930 and are in the public domain in the United States; their authors died before 1950. Front
and back matter, footnotes, page numbers and headings were removed, lines unwrapped, quotation marks made uniform. About
2 % (runs of 12 paragraphs, one in every 600) were held out for validation.

In the first run every epoch held the text twice: as running text, and as answers to requests ("Tell me a story
about ...") whose keywords were taken from the passage; in about a third of the answers one animal or name was exchanged
for another in both. The small talk (who it is, what it cannot do, greetings) is original.

In the second run an answer begins with the sentence that holds its subject. The subject is exchanged in the request
and in the whole passage for one of about 800 nouns, or for a made-up word (one in eight), so that it can only be
taken from the request. Half of the stories have one or two first sentences that were written for it. Stories without
a subject, "What happened next?", small talk and running text (a quarter to a third of the tokens) stay in the
mixture.
"""
METHOD = """\
AdamW (betas 0.9, 0.98; weight decay on matrices), linear warm-up, constant rate, then 1 - sqrt decay to zero; bfloat16
autocast over float32 weights; targets are the story and the answers, never the requests. The last steps train on rows
of full length, the others on short rows. Dropout paused between the two steps named.
"""
FIRST_RUN = """\
An epoch held 1,000 pieces of small talk, and 500 until step 3,600. It ran on 2 CPU cores.
"""
SECOND_RUN = """\
It continues from the weights of the first run, on 1 CPU core. The tokens of a subject count three times in the loss.
The run that made these weights differed from the table until step 500: 2,048 tokens a step, learning rate 0.0008, no
emphasis on subjects, and longer passages. Until step 1,750 an epoch held 35 % of the running text, since then 45 %. It
was resumed with a longer schedule while its learning rate was falling.
"""
REPRODUCTION = """\
The commands in the package's README train such a model again.
Sums run in another order on another machine, so the weights will differ in the last bits and then more.
"""
