"""The column `system` of records: the system message of a prompt of messages without one."""

import json

import pytest
from tiny_models import build_tokenizer

from oat.data.formats import Layout
from oat.data.prompts import Prompts, PromptSet, Source
from oat.errors import DataError
from oat.seeds import Seeds
from oat.text.renderer import Renderer
from oat.types import Message

QUESTION = [{"role": "user", "content": "1+1"}]
ANSWERED = [*QUESTION, {"role": "assistant", "content": "2"}]
SAID = {"role": "system", "content": "Be brief."}
SHARED = [{"from": "human", "value": "Why?"}]


@pytest.mark.parametrize("is_learned", [True, False])
@pytest.mark.parametrize(
    ("record", "is_read"),
    [
        ({"messages": [*QUESTION, *ANSWERED[1:]]}, True),
        ({"conversations": [*SHARED, {"from": "gpt", "value": "So."}]}, True),
        (
            {"conversations": [{"from": "system", "value": " "}, *SHARED, {"from": "gpt", "value": "So."}]},
            True,
        ),
        ({"prompt": QUESTION, "completion": ANSWERED[1:]}, True),
        ({"prompt": QUESTION, "completion": ANSWERED}, True),
        ({"prompt": "Why?", "completion": "So."}, False),
        ({"prompt": [{**SAID, "content": "Be long."}, *QUESTION], "completion": ANSWERED[1:]}, False),
        (
            {"prompt": [{**SAID, "role": "developer", "content": "Go."}, *QUESTION], "completion": "So."},
            False,
        ),
        ({"prompt": [SAID, *QUESTION], "completion": "So."}, None),
    ],
)
def test_a_column_system_is_the_system_message_or_is_named(record, is_read, is_learned):
    """It is read where the prompt is made of messages that have none. Whatever the format, the rest of the
    prompt and the response are those of the record without the column."""

    def of(record):
        return PromptSet(Source([record]), Layout(responses=("completion",) if is_learned else ()))

    bare, found = of(record), of({**record, "system": "Be brief."})
    assert found[0].messages == ((Message("system", "Be brief."),) if is_read else ()) + bare[0].messages
    assert found[0].columns == {**bare[0].columns, "system": "Be brief."}
    assert ("system" in found.index.unrendered) == (is_read is False)
    for empty in ("", " ", None):
        unread = of({**record, "system": empty})
        assert (unread[0].messages, unread.index.unrendered) == (bare[0].messages, bare.index.unrendered)


def test_a_column_system_beside_a_common_prompt():
    """The common beginning of two conversations is a prompt of messages."""
    pair = {"chosen": ANSWERED, "rejected": [*QUESTION, {"role": "assistant", "content": "No."}]}
    for record in (pair, {**pair, "prompt": "Why?"}):
        layout = Layout(responses=("chosen", "rejected"))
        (found,) = PromptSet(Source([{**record, "system": "Be brief."}]), layout)
        assert [message.role for message in found.messages] == ["system", "user"]
        assert found.columns["chosen"] == ANSWERED[1:]


def test_data_that_an_earlier_version_read_otherwise_are_refused_with_the_reason(tmp_path):
    records = [{"prompt": QUESTION, "system": "Be brief."}, {"prompt": "Why?"}]
    template = tmp_path / "turns.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}")
    renderer = Renderer(build_tokenizer(), template=str(template))
    for record in records:
        path = tmp_path / f"{len(record)}.jsonl"
        path.write_text(json.dumps(record))
        with pytest.raises(DataError, match="got others") as refused:
            Prompts(path, renderer, Seeds(0)).refuse_others(["another"])
        assert ("did not read the column `system`" in str(refused.value)) == ("system" in record)
