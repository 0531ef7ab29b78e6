"""The zoo's table is what its command found, and a sample of it is still true.

One architecture per mechanism is trained here; ``python tests/zoo.py`` trains them all.
"""

from __future__ import annotations

import pytest
from zoo import TABLE, differences_in, expectations, measure, table
from zoo_entries import ENTRIES

SAMPLE = (
    "gpt2/eager",  # scores written out, a logger call in the forward
    "gemma2",  # softcap
    "falcon/alibi/eager",
    "bloom",  # ALiBi and a custom autograd Function
    "gpt_oss",  # sinks, mixture of experts
    "deepseek_v3",  # latent attention: other sizes for values
    "llama4_text",  # chunked attention
    "lfm2",  # a mixer of another kind
    "bert/classify",  # class token
    "t5",  # two sequences, a learned table of biases
    "whisper",  # a fixed number of tokens, and two sequences
    "dinov2",
    "wav2vec2",  # a computed number of tokens, a convolution over them
    "decoder_layer",
)
FULLY = 40


@pytest.mark.parametrize("name", SAMPLE)
def test_sample(name):
    outcome = measure(ENTRIES[name])
    assert outcome.difference <= ENTRIES[name].tolerance, outcome.worst
    assert outcome.facts == expectations()[name]


def test_every_entry_is_in_the_table():
    facts, text = expectations(), TABLE.read_text()
    assert list(facts) == list(ENTRIES)
    versions = text.splitlines()[2]
    made = table(facts, differences_in(text))
    assert made.replace(made.splitlines()[2], versions) == text


def test_what_the_zoo_shows():
    facts = expectations()
    errors = {name: row.error for name, row in facts.items() if row.error}
    assert not errors
    architectures = {
        name.split("/")[0] for name, row in facts.items() if row.verdict == "chunked"
    }
    assert len(architectures) >= FULLY
    for name, text in differences_in(TABLE.read_text()).items():
        assert float(text) <= ENTRIES[name].tolerance
    assert all(row.whole for row in facts.values() if row.verdict != "chunked")
