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

**What it is good for:** demonstrations, tests, and a smile. Ask it for a story about a fox and a queen; say hello; ask
what happened next; or let it continue "Once upon a time".

**What it is not:** it knows no facts, follows no instructions beyond asking for a story, cannot reason, count or
translate, speaks only (old-fashioned) English, and forgets everything beyond {num_positions} tokens. Its answers to
greetings and its refusals are sound, for it learned them by heart. Its stories have the sound of an old book and
little sense: sentences are often crooked, plots wander, sons become daughters, it mostly drops the subject it was
asked for, and now and then it recites a line of a book it read. Greedy decoding repeats itself. System messages are
accepted and ignored. The books are of their time, also in how they speak of people; paragraphs with the worst words
were left out of the training text, but nothing filters what the model writes. Do not put it before children
unattended, nor to any serious use.
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

Every epoch holds the text twice: as running text, and as answers to requests ("Tell me a story about ...") whose
keywords were taken from the passage; in about a third of the answers one animal or name was exchanged for another in
both. The small talk (who it is, what it cannot do, greetings) is original.
"""
METHOD = """\
AdamW (betas 0.9, 0.98; weight decay on matrices), linear warm-up, constant rate, then 1 - sqrt decay to zero; bfloat16
autocast over float32 weights; targets are the story and the answers, never the requests. The last steps train on rows
of {num_positions} tokens, the others on rows of {short_length}. An epoch holds 1,000 pieces of small talk; these
weights saw 500 an epoch until step 3,600. Dropout paused between the two steps named.
"""
REPRODUCTION = """\
Reproduced by the command in the package's README; sums run in another order on another machine, so the weights will
differ in the last bits and then more.
"""
