"""What is wanted: a cheerful story that does not say the same again and again."""

from oat.oracles.rules.sentiment import cheerful


def gold(prompts, completions, **columns):
    """The mean sentiment of a story's sentences, times the square of the share of its words that differ from
    each other; between -1 and 1."""
    return [
        mood * varied(text) ** 2
        for mood, text in zip(cheerful(prompts, completions), completions, strict=True)
    ]


def varied(text):
    words = text.lower().split()
    return len(set(words)) / max(1, len(words))
