"""Tokenizers saved to disk, chat messages, and chat families."""

import warnings
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from oat.text.renderer import Renderer
from oat.types import Message

MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "☃"]


TEMPLATES = Path(__file__).parents[1] / "text" / "templates"


LINES = [
    "what is two and two?",
    "the answer is four\n",
    "user assistant system tool",
    "Once upon a time, a cat sat.",
] * 3


FORGETFUL = (
    "{% for message in messages %}{% set content = message['content'] %}"
    "{% if not loop.last and '</think>' in content %}{% set content = content.split('</think>')[1] %}{% "
    "endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


SETTINGS = settings(derandomize=True, deadline=None, max_examples=30)


TEXTS = st.text(
    st.characters(exclude_categories=("Cs",), exclude_characters="\0\ufdd0\ufdd1"), min_size=1, max_size=12
)


HOSTILE = st.lists(
    st.one_of(TEXTS, st.sampled_from([*SPECIALS, *MARKS, "\n", "\ufdd0", "\ufdd1"])), min_size=1, max_size=5
).map("".join)


def user(text):
    return Message("user", text)


def assistant(text):
    return Message("assistant", text)


def save_byte_level(folder, *, specials=SPECIALS, added=(), **special):
    """Save a byte-level BPE tokenizer, and return it. Its encoding and decoding keep every text. The tokens
    `added` are not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
    post = special.pop("post", None)
    if post:
        names = [(name, tokenizer.token_to_id(name)) for name in specials]
        tokenizer.post_processor = processors.TemplateProcessing(single=post, special_tokens=names)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", **special).save_pretrained(
        folder
    )
    return AutoTokenizer.from_pretrained(folder)


def write(folder, template):
    path = folder / "template.jinja"
    path.write_text(template, encoding="utf-8")
    return str(path)


class Family:
    """A chat family: its tokenizer, saved with its template and loaded again, and the renderer of `oat` for
    it.

    Attributes:
        warned: the warnings of the renderer while it was made.
    """

    def __init__(self, folder, template, specials, end, **special):
        template = (
            (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8") if template.isalnum() else template
        )
        self.tokenizer = save_byte_level(folder, specials=specials, chat_template=template, **special)
        self.end = end
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            self.renderer = Renderer(self.tokenizer, template="tokenizer")
        self.warned = [str(warning.message) for warning in seen]

    def text(self, *messages, generate=False):
        """Return the text of the template."""
        plain = [message.plain for message in messages]
        return self.tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=generate)

    def ids(self, *messages, generate=False):
        """Return the ids of that text by transformers. Without `generate`, they end with the last end-of-turn
        token."""
        ids = self.tokenizer(self.text(*messages, generate=generate), add_special_tokens=False)["input_ids"]
        end = self.tokenizer.convert_tokens_to_ids(self.end)
        return ids if generate else ids[: len(ids) - ids[::-1].index(end)]


LLAMA_SPECIALS = [
    "<|endoftext|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]


OPENS = "assistant\\n<think>\\n' -}}{%- endif -%}"


def opens_reasoning(template):
    """Return the template with a generation prompt that opens <think>, as the template of Qwen3-Thinking
    does."""
    opened = template.replace("assistant\\n' -}}{%- endif -%}", OPENS).replace(
        "assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}"
    )
    assert opened != template
    return opened


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2, "three"]}}}


NO_END = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
