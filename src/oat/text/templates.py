"""The built-in chat template, in Jinja."""

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML (OpenAI, 2023; the format of Qwen and others), without a default system prompt."""

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
"""What the template needs as single tokens."""
