"""The date that a template writes, and the templates that can be chosen."""

import datetime
import re

import pytest
from chats import (
    NO_END,
    SPECIALS,
    assistant,
    save_byte_level,
    user,
    write,
)
from fixtures import World, oat
from tokenizers import (
    Tokenizer,
    models,
    pre_tokenizers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from oat.commands.digest import digest_run
from oat.config.load import load_config
from oat.errors import TemplateError
from oat.text.renderer import Renderer
from oat.types import Message

DAY = datetime.date(2024, 2, 9)


def test_a_template_with_a_system_header_and_a_date_by_hand(llama32):
    renderer = Renderer(llama32.tokenizer, template="tokenizer", system="be kind", date=DAY)
    ids, mask = renderer.loss_mask(
        [
            Message("system", "be kind"),
            user(" hi \n"),
            assistant("yes"),
            Message("tool", "4"),
            assistant("no"),
        ]
    )
    header = "<|start_header_id|>{}<|end_header_id|>\n\n{}"
    expected = "<|begin_of_text|>" + header.format(
        "system", "Cutting Knowledge Date: December 2023\nToday Date: 09 Feb 2024\n\nbe kind<|eot_id|>"
    )
    expected += header.format("user", "hi<|eot_id|>") + header.format("assistant", "yes<|eot_id|>")
    expected += header.format("ipython", '"4"<|eot_id|>') + header.format("assistant", "no<|eot_id|>")
    assert renderer.decode(ids) == expected
    assert renderer.decode(ids[mask]) == "yes<|eot_id|>no<|eot_id|>"
    assert renderer.decode(renderer.prompt([user("hi")])) == expected[: expected.index("yes")]
    assert renderer.template == llama32.tokenizer.chat_template, (
        "what an exported model shows is the day of its use"
    )


def test_without_a_date_a_template_reads_the_day_of_today(llama32):
    day, messages = datetime.date.today(), [user("hi")]
    ids, whole = (
        Renderer(llama32.tokenizer, template="tokenizer").prompt(messages).tolist(),
        llama32.ids(*messages, generate=True),
    )
    dated = Renderer(llama32.tokenizer, template="tokenizer", date=day).prompt(messages).tolist()
    assert ids == whole == dated or datetime.date.today() != day


@pytest.mark.parametrize("format", ['"%d %B %Y"', "'%Y-%m-%d'", ' "%d" '])
def test_the_format_of_a_date_is_the_templates(tokenizer, tmp_path, format):
    renderer = Renderer(
        tokenizer,
        template=write(tmp_path, f"{{{{ strftime_now({format}) | replace('x', '') + '\n' }}}}" + NO_END),
        date=DAY,
    )
    assert renderer.decode(renderer.prompt([user("hi")])).split("\n")[0] == DAY.strftime(format.strip(" \"'"))


def test_dates_that_cannot_be(tokenizer, tmp_path):
    for template in (None, "chatml", write(tmp_path, NO_END)):
        with pytest.raises(
            TemplateError, match="the date 2024-02-09 is given, and the template reads none; remove it"
        ):
            Renderer(tokenizer, template=template, date=DAY)
    with pytest.raises(TemplateError, match="computes the format of its date"):
        Renderer(tokenizer, template=write(tmp_path, "{% set f = '%Y' %}{{ strftime_now(f) }}" + NO_END))


def dated_config(world: World, folder, **changes):
    """Return the configuration of a run whose prompts begin with the date."""
    folder.mkdir(exist_ok=True)
    template = folder.parent / "chat.jinja"
    template.write_text(
        '{{ strftime_now("%Y%m%d") }}{% for m in messages %}{{ m.content }}{% endfor %}', encoding="utf-8"
    )
    return world.config("grpo", folder, {"evaluation": None, "render.template": str(template), **changes})


@pytest.mark.slow(instead="test_without_a_date_a_template_reads_the_day_of_today", seconds=2.0)
@pytest.mark.filterwarnings("ignore:the chat template rewrites history")
def test_a_run_keeps_its_day(world, tmp_path, capsys):
    whole, parted, today = (dated_config(world, tmp_path / name) for name in ("whole", "parted", "today"))
    before = datetime.date.today()
    assert oat("train", whole, "--render.date", DAY) == oat("train", today) == 0
    assert (
        before <= load_config(today.parent / "grpo" / "config.yaml")[0].render.date <= datetime.date.today()
    )
    assert oat("train", parted, "--render.date", DAY, "--stop.max_steps", 2) == 0
    assert oat("train", parted, "--render.date", "2024-02-10") == 2
    assert 'render.date: "2024-02-09" -> "2024-02-10"' in capsys.readouterr().err
    assert oat("train", parted) == 0, "on another day, and nobody names the first"
    assert load_config(parted.parent / "grpo" / "config.yaml")[0].render.date == DAY
    one, other, dated = (digest_run(config.parent / "grpo") for config in (whole, parted, today))
    assert one["ledger"] == other["ledger"] != dated["ledger"]
    assert one["weights"] == other["weights"]


def test_the_configuration_of_a_date(world, tmp_path, capsys):
    config = dated_config(world, tmp_path / "run")
    for flags, message in (
        (["--render.template", "null"], "--render.date: nothing reads render.date"),
        (["--render.template", "chatml"], "--render.date: nothing reads render.date"),
        (["--render.date", "2024-02-30"], "--render.date: cannot read the value '2024-02-30'"),
        (["--render.date", "today"], "--render.date: the field `render.date` is 'today'"),
    ):
        assert oat("train", config, "--render.date", DAY, *flags) == 2
        assert message in capsys.readouterr().err
    config.write_text(
        config.read_text(encoding="utf-8").replace("render:\n", "render:\n  date: 2024-02-30\n"),
        encoding="utf-8",
    )
    assert oat("train", config) == 2
    assert "correct it" in capsys.readouterr().err
    plain = world.config("grpo", tmp_path, {"evaluation": None, "stop.max_steps": 1})
    assert oat("train", plain) == 0
    assert load_config(tmp_path / "grpo" / "config.yaml")[0].render.date is None


def test_the_tokenizers_own_template(tmp_path):
    tokenizer = save_byte_level(tmp_path, chat_template=NO_END)
    renderer = Renderer(tokenizer, template="tokenizer")
    assert renderer.decode(renderer.prompt([user("hi")])) == "user: hi\nassistant: "


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"template": "tokenizer"}, "has no chat template; set `render.template`"),
        ({"template": "chat-ml"}, "did you mean `chatml`"),
        ({"template": "absent.jinja"}, "cannot read the template absent.jinja"),
        ({"template": None, "system": "be kind"}, "a system prompt needs a chat template"),
    ],
)
def test_a_template_that_cannot_be_had(tokenizer, arguments, message):
    with pytest.raises(TemplateError, match=message):
        Renderer(tokenizer, **arguments)


@pytest.mark.parametrize(
    ("options", "proposed"),
    [
        ({}, "chatml or a .jinja file that ends turns with {{ eos_token }}"),
        (
            {"chat_template": NO_END},
            "tokenizer or chatml or a .jinja file that ends turns with {{ eos_token }}",
        ),
        ({"specials": SPECIALS[:1]}, "a .jinja file that ends turns with {{ eos_token }}"),
    ],
)
def test_only_templates_that_can_work_are_proposed(tmp_path, options, proposed):
    renderer = Renderer(save_byte_level(tmp_path, **options), template=None)
    expected = re.escape(
        f'needs a chat template; set `render.template` to {proposed} (docs/data.md, "Chat templates")'
    )
    with pytest.raises(TemplateError, match=expected):
        renderer.prompt([Message("system", "a"), user("b")])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('never') }}", "cannot render a conversation of user"),
        ("{% for", "cannot render a conversation of user"),
        (
            "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}",
            "leaves out an assistant's message",
        ),
    ],
)
def test_a_broken_template(tokenizer, tmp_path, template, message):
    with pytest.raises(TemplateError, match=message):
        Renderer(tokenizer, template=write(tmp_path, template))


def test_chatml_needs_its_tokens(tmp_path):
    built = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=built, unk_token="<unk>").save_pretrained(tmp_path)
    with pytest.raises(TemplateError, match="as one token"):
        Renderer(AutoTokenizer.from_pretrained(tmp_path), template="chatml")
