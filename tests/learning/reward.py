"""The reward of the learning tests: the share of even digits in a response."""


def even_share(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
    return [sum(c in "02468" for c in text) / max(1, len(text)) for text in completions]
