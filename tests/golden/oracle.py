"""The oracle of the golden runs. Every answer is in their ledgers; being asked is a failure."""


def reward(prompts, completions, **columns):
    raise AssertionError("a golden run asked a question; it must only replay its ledger")
