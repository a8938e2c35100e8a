"""Selection rules and measures of disagreement: properties for all of them, slow versions, and small cases by
hand."""

import math
from collections.abc import Iterator
from itertools import combinations, permutations
from typing import Any

import numpy as np
import pytest
from explorer_rounds import chi_square
from hypothesis import given, settings
from hypothesis import strategies as st

from oat.errors import ConfigError, ContractError
from oat.explore.find_rule import call_rule, find_rule
from oat.explore.rules import RULES, _information
from oat.explore.uncertainty import MEASURES, bernoulli_variance, kl_disagreement, logits_variance

MEMBERS, PROMPTS, SIZE = 4, 3, 6
NO_CLASH = sorted(set(RULES) - {"eets"})
DRAWS_CANDIDATES = ("uniform", "mean_best_random", "passive")


@st.composite
def beliefs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Rewards, all different, and a mask with at least two candidates of each prompt."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = draw(st.sampled_from([0.1, 1.0, 30.0]))
    rewards_MBG = (scale * generator.normal(size=(MEMBERS, PROMPTS, SIZE))).astype(np.float32)
    valid_BG = generator.random((PROMPTS, SIZE)) < draw(st.sampled_from([0.3, 0.7, 1.0]))
    valid_BG[:, :2] |= valid_BG.sum(axis=1, keepdims=True) < 2
    return rewards_MBG, valid_BG


def chosen(name: str, rewards_MBG: np.ndarray, valid_BG: np.ndarray, seed: int = 0, **options: Any) -> Any:
    return call_rule(find_rule(name, options), rewards_MBG, valid_BG, np.random.default_rng(seed))


@pytest.mark.parametrize("name", sorted(RULES))
@given(beliefs(), st.integers(0, 100))
@settings(max_examples=30, deadline=None)
def test_only_candidates_are_chosen(name: str, given: tuple[np.ndarray, np.ndarray], seed: int) -> None:
    rewards_MBG, valid_BG = given
    pairs_B2 = chosen(name, rewards_MBG, valid_BG, seed)
    assert np.take_along_axis(valid_BG, pairs_B2, axis=1).all()
    hidden = np.where(valid_BG, rewards_MBG, np.float32(1e6))
    assert (chosen(name, hidden, valid_BG, seed) == pairs_B2).all(), "the rewards of others are not read"


@pytest.mark.parametrize("name", NO_CLASH)
@given(beliefs(), st.integers(0, 100))
@settings(max_examples=20, deadline=None)
def test_two_different_candidates_are_chosen(
    name: str, given: tuple[np.ndarray, np.ndarray], seed: int
) -> None:
    pairs_B2 = chosen(name, *given, seed)
    assert (pairs_B2[:, 0] != pairs_B2[:, 1]).all()


@pytest.mark.inventory(65, 70)
@given(beliefs(), st.integers(0, 100))
@settings(max_examples=50, deadline=None)
def test_eets_clashes_only_where_all_members_agree(given: tuple[np.ndarray, np.ndarray], seed: int) -> None:
    rewards_MBG, valid_BG = given
    best_MB = np.where(valid_BG, rewards_MBG, -np.inf).argmax(axis=-1)
    pairs_B2 = chosen("eets", rewards_MBG, valid_BG, seed)
    agree_B = (best_MB == best_MB[0]).all(axis=0)
    assert ((pairs_B2[:, 0] == pairs_B2[:, 1]) == agree_B).all()
    wider_B2 = chosen("eets", rewards_MBG, valid_BG, seed, second_best=True)
    assert (wider_B2[:, 0] != wider_B2[:, 1]).all()
    assert (wider_B2[~agree_B] == pairs_B2[~agree_B]).all()


@pytest.mark.parametrize("name", sorted(set(RULES) - {*DRAWS_CANDIDATES}))
@given(beliefs(), st.permutations(range(SIZE)), st.integers(0, 100))
@settings(max_examples=20, deadline=None)
def test_the_order_of_candidates_does_not_matter(
    name: str, given: tuple[np.ndarray, np.ndarray], order: list[int], seed: int
) -> None:
    """If the candidates are permuted, so is the choice. `uncertainty` and the rules of information choose a
    pair without an order. `best_arm_information` has no preference between pairs whose answers tell equally
    much: where all members prefer one candidate, and where their probabilities are 0 or 1."""
    rewards_MBG, valid_BG = given
    if name == "best_arm_information":
        is_pair_BGG = valid_BG[:, :, None] & valid_BG[:, None, :] & np.triu(np.ones((SIZE, SIZE), bool), k=1)
        values_BP = np.where(is_pair_BGG, _information(rewards_MBG, valid_BG), -np.inf).reshape(
            len(valid_BG), -1
        )
        second_B, first_B = np.sort(values_BP, axis=1)[:, -2:].T
        is_clear_B = first_B > second_B + 1e-9
        rewards_MBG, valid_BG = rewards_MBG[:, is_clear_B], valid_BG[is_clear_B]
    pairs_B2 = chosen(name, rewards_MBG, valid_BG, seed)
    moved_B2 = np.array(order)[chosen(name, rewards_MBG[..., order], valid_BG[:, order], seed)]
    assert (np.sort(moved_B2, axis=1) == np.sort(pairs_B2, axis=1)).all()


@pytest.mark.inventory(64)
@pytest.mark.parametrize("name", sorted(MEASURES))
@given(beliefs())
@settings(max_examples=30, deadline=None)
def test_a_measure_is_symmetric_and_zero_on_the_diagonal(
    name: str, given: tuple[np.ndarray, np.ndarray]
) -> None:
    values_BGG = MEASURES[name](given[0])
    assert np.isfinite(values_BGG).all()
    assert (values_BGG >= 0).all()
    assert (values_BGG == values_BGG.swapaxes(1, 2)).all()
    assert (np.einsum("bii->bi", values_BGG) == 0).all()


@pytest.mark.inventory(64)
@pytest.mark.parametrize("name", sorted(MEASURES))
@given(beliefs())
@settings(max_examples=20, deadline=None)
def test_equal_members_do_not_disagree(name: str, given: tuple[np.ndarray, np.ndarray]) -> None:
    """Every measure of pairs is 0 if all members give the same rewards. The exception is `bernoulli`. It is
    the variance of one answer, p (1 - p), and is 0 only if the winner is certain."""
    rewards_BG = given[0][0].astype(float)
    values_BGG = MEASURES[name](np.stack([rewards_BG] * MEMBERS))
    expected_BGG = np.zeros_like(values_BGG)
    if name == "bernoulli":
        p_BGG = 1 / (1 + np.exp(rewards_BG[:, None, :] - rewards_BG[:, :, None]))
        expected_BGG = p_BGG * (1 - p_BGG) * (1 - np.eye(SIZE))
    np.testing.assert_allclose(values_BGG, expected_BGG, rtol=1e-6, atol=1e-12)


@given(beliefs())
@settings(max_examples=30, deadline=None)
def test_the_variances_are_those_of_numpy(given: tuple[np.ndarray, np.ndarray]) -> None:
    rewards_MBG = given[0].astype(float)
    difference = rewards_MBG[..., :, None] - rewards_MBG[..., None, :]
    np.testing.assert_allclose(
        logits_variance(given[0]), difference.var(axis=0, ddof=1), rtol=1e-6, atol=1e-9
    )
    p = 1 / (1 + np.exp(-difference))
    np.testing.assert_allclose(
        MEASURES["probability"](given[0]), p.var(axis=0, ddof=1), rtol=1e-6, atol=1e-12
    )


def test_measures_by_hand() -> None:
    """Two members: the odds that the first candidate wins are 3 to 1 and 1 to 3, so pbar is 1/2. The variance
    of an answer is 1/4, and each member's divergence from pbar is log 2 - H(1/4)."""
    rewards_MBG = np.array([[[np.log(3), 0.0]], [[-np.log(3), 0.0]]])
    own = -(0.25 * np.log(0.25) + 0.75 * np.log(0.75))
    assert logits_variance(rewards_MBG)[0, 0, 1] == pytest.approx(2 * np.log(3) ** 2)
    assert MEASURES["probability"](rewards_MBG)[0, 0, 1] == pytest.approx(2 * 0.25**2)
    assert bernoulli_variance(rewards_MBG)[0, 0, 1] == pytest.approx(0.25)
    assert kl_disagreement(rewards_MBG)[0, 0, 1] == pytest.approx(np.log(2) - own)


REWARDS = np.array([[[5.0, 4.0, 0.0, 1.0]], [[5.0, 0.0, 4.0, 1.0]]])
"""Both members find candidate 0 best. They disagree about 1 and 2. About 3 they agree."""
EVERY = np.ones((1, 4), dtype=bool)


@pytest.mark.inventory(67)
@pytest.mark.parametrize(
    ("name", "pair"),
    [
        ("passive", {0, 1}),
        ("uncertainty", {1, 2}),
        ("mean_best_worst", {0, 3}),
        ("mean_best_variance", {0, 1}),
        ("bai_ts", {0, 1}),
        ("eets", {0}),
    ],
)
def test_a_choice_by_hand(name: str, pair: set[int]) -> None:
    assert set(chosen(name, REWARDS, EVERY)[0].tolist()) == pair


SPLIT = np.array([[[0.0, -9.0, 4.0, 5.0, 1.0]], [[0.0, 4.0, 4.0, 1.0, 5.0]]])
"""The members find candidates 3 and 4 best. By the mean, 2 is best. Against 2, 3 and 4 alike, the members
disagree most about 1. So the second candidate of the largest variance (1) is neither the one of the largest
mean (2) nor the first one of all (0)."""


def drawn(name: str, rewards_MG: np.ndarray, prompts: int = 64, **options: Any) -> list[tuple[int, ...]]:
    """Return the pairs that a rule chooses for many prompts with the same rewards, (M, 1, G)."""
    rewards_MBG = np.repeat(rewards_MG, prompts, axis=1)
    pairs_B2 = chosen(name, rewards_MBG, np.ones(rewards_MBG.shape[1:], dtype=bool), **options)
    return [tuple(pair) for pair in pairs_B2.tolist()]


@pytest.mark.inventory(66, 67)
@pytest.mark.parametrize(
    ("name", "variance", "pairs"),
    [
        ("bai_ts", None, {(3, 1), (4, 1)}),
        ("bai_ts", "logits", {(3, 1), (4, 1)}),
        ("bai_ts", "probability", {(3, 4), (4, 3)}),
        ("mean_best_variance", None, {(2, 1)}),
        ("uncertainty", None, {(1, 3)}),
    ],
)
def test_the_second_candidate_is_the_one_of_the_largest_variance(
    name: str, variance: str | None, pairs: set[tuple[int, int]]
) -> None:
    """Against the best candidate of a drawn member (`bai_ts`), or the best one by the mean. A difference of
    rewards of 5 and one of 14 are nearly the same probability, so that `probability` finds another one."""
    assert set(drawn(name, SPLIT, **({"variance": variance} if variance else {}))) == pairs


@pytest.mark.inventory(70)
def test_eets_takes_a_members_second_best_where_all_agree_about_the_best() -> None:
    """All find candidate 3 best. Their second best are 1 and 2. The worst is 0, and by the mean the second
    best is 4."""
    rewards_MG = np.array([[[-9.0, 4.0, 0.0, 5.0, 3.0]], [[-9.0, 0.0, 4.0, 5.0, 3.0]]])
    assert set(drawn("eets", rewards_MG)) == {(3, 3)}
    assert set(drawn("eets", rewards_MG, second_best=True)) == {(3, 1), (3, 2)}


@pytest.mark.inventory(65)
def test_eets_looks_at_as_many_members_as_tries_says() -> None:
    """Two members find candidate 0 best, and one finds 1 best. One member alone cannot disagree, of two some
    do, and of three one does always."""
    rewards_MG = np.array([[[2.0, 1.0, 0.0]], [[2.0, 1.0, 0.0]], [[1.0, 2.0, 0.0]]])
    others = {(0, 1), (1, 0)}
    assert set(drawn("eets", rewards_MG, tries=1)) == {(0, 0), (1, 1)}
    assert set(drawn("eets", rewards_MG, tries=2)) == others | {(0, 0)}
    assert set(drawn("eets", rewards_MG, tries=3)) == others
    assert set(drawn("eets", rewards_MG)) == others


def test_double_ts_asks_another_member_for_the_second_candidate() -> None:
    """The members find candidates 1 and 3 best. The second best of both is another one: 2 and 0."""
    rewards_MG = np.array([[[1.0, 5.0, 4.0, 0.0]], [[4.0, 0.0, 1.0, 5.0]]])
    assert set(drawn("double_ts", rewards_MG)) == {(1, 3), (3, 1)}


def test_uniform_draws_every_ordered_pair_of_candidates_alike() -> None:
    """12 pairs of 4 candidates; sample 2 is none. The limit is exceeded by chance once in 1000 seeds."""
    valid_BG = np.tile([True, True, False, True, True], (2400, 1))
    pairs_B2 = chosen("uniform", np.zeros((MEMBERS, *valid_BG.shape)), valid_BG)
    assert chi_square(map(tuple, pairs_B2.tolist()), [*permutations((0, 1, 3, 4), 2)]) < 31.3


def test_mean_best_random_draws_every_other_candidate_alike() -> None:
    """Candidate 0 is best by the mean. The limit is exceeded by chance once in 1000 seeds."""
    assert chi_square(drawn("mean_best_random", REWARDS, 1200), [(0, 1), (0, 2), (0, 3)]) < 13.8


def test_expected_improvement_by_hand() -> None:
    """The means are 2, 1.5 and 1. Over candidate 0, candidate 1 gains 0 and 0, candidate 2 gains 0 and 1."""
    rewards_MBG = np.array([[[2.0, 1.5, -1.0]], [[2.0, 1.5, 3.0]]])
    every = np.ones((1, 3), dtype=bool)
    assert chosen("mean_best_improvement", rewards_MBG, every).tolist() == [[0, 2]]


def test_information_about_the_best_by_hand() -> None:
    """One member finds candidate 0 best and one finds candidate 1 best. Only a comparison of these two tells
    which is right; the members agree about all pairs of 2 and 3."""
    rewards_MBG = np.array([[[2.0, 0.0, -9.0, -9.5]], [[0.0, 2.0, -9.0, -9.5]]])
    assert set(chosen("best_arm_information", rewards_MBG, EVERY)[0].tolist()) == {0, 1}
    assert set(chosen("information_directed", rewards_MBG, EVERY)[0].tolist()) == {0, 1}


def slow_entropy(p: float) -> float:
    return -sum(each * math.log(each) for each in (p, 1 - p) if each > 0)


def slow_information(rows: list[list[float]], candidates: list[int], one: int, other: int) -> float:
    """Return the mutual information of the answer about a pair and the best candidate. Every member has one
    vote for the best."""

    def answer(of: list[list[float]]) -> float:
        return slow_entropy(sum(0.5 * (1 + math.tanh((row[one] - row[other]) / 2)) for row in of) / len(of))

    voters: dict[int, list[list[float]]] = {}
    for row in rows:
        voters.setdefault(max(candidates, key=row.__getitem__), []).append(row)
    return answer(rows) - sum(len(some) / len(rows) * answer(some) for some in voters.values())


def slow_ratio(
    rows: list[list[float]], candidates: list[int], one: int, other: int, information: float
) -> float:
    """Return the squared expected regret of a pair, divided by its information. The small number decides
    between pairs without any information."""
    regrets = [max(row[place] for place in candidates) - (row[one] + row[other]) / 2 for row in rows]
    return ((sum(regrets) / len(rows)) ** 2 + 1e-12) / (information + 1e-12)


def each_prompt(
    rewards_MBG: np.ndarray, valid_BG: np.ndarray
) -> Iterator[tuple[list[list[float]], list[int], list[tuple[int, int]]]]:
    """Yield, for each prompt, the rewards by member, the candidates and their pairs."""
    for place, valid_G in enumerate(valid_BG):
        candidates = np.flatnonzero(valid_G).tolist()
        rows = rewards_MBG[:, place].astype(float).tolist()
        yield rows, candidates, list(combinations(candidates, 2))


@given(beliefs())
@settings(max_examples=20, deadline=None)
def test_the_rules_of_information_are_those_of_a_slow_version(given: tuple[np.ndarray, np.ndarray]) -> None:
    """`best_arm_information` chooses the pair of most information, and `information_directed` the one of the
    least ratio of squared regret to information."""
    informed, directed = (chosen(name, *given) for name in ("best_arm_information", "information_directed"))
    found_BGG = _information(*given)
    for place, (rows, candidates, pairs) in enumerate(each_prompt(*given)):
        information = {pair: slow_information(rows, candidates, *pair) for pair in pairs}
        ratios = {pair: slow_ratio(rows, candidates, *pair, max(0.0, information[pair])) for pair in pairs}
        for pair in pairs:
            assert found_BGG[place][pair] == pytest.approx(information[pair], abs=1e-9)
        assert information[tuple(informed[place])] > max(information.values()) - 1e-9
        assert ratios[tuple(directed[place])] < min(ratios.values()) * (1 + 1e-3)


def test_a_member_is_drawn_for_each_prompt() -> None:
    """Two members prefer different candidates. With a member for each prompt, both are drawn among 64
    prompts. With one for the batch, one is."""
    rewards_MBG = np.repeat(np.array([[[1.0, 0.0, 0.0]], [[0.0, 1.0, 0.0]]]), 64, axis=1)
    every = np.ones((64, 3), dtype=bool)
    assert set(chosen("bai_ts", rewards_MBG, every)[:, 0].tolist()) == {0, 1}
    assert len(set(chosen("bai_ts", rewards_MBG, every, member="batch")[:, 0].tolist())) == 1
    assert set(chosen("eets", rewards_MBG, every)[:, 0].tolist()) == {0, 1}
    assert len(set(chosen("eets", rewards_MBG, every, member="batch")[:, 0].tolist())) == 1


def test_a_prompt_without_two_candidates_is_not_shown_to_the_rule() -> None:
    valid_BG = np.array([[True, False, False], [True, True, True]])
    seen = []

    def rule(rewards_MBG: np.ndarray, valid_BG: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        seen.append(valid_BG)
        return np.array([[1, 2]])

    pairs_B2 = call_rule(rule, np.zeros((2, 2, 3)), valid_BG, np.random.default_rng(0))
    assert pairs_B2.tolist() == [[0, 0], [1, 2]]
    assert seen[0].tolist() == [[True, True, True]]


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("bai", {}, "there is no rule 'bai'; did you mean `bai_ts`"),
        (
            "bai_ts",
            {"varience": "logits"},
            "the rule bai_ts has no option 'varience'; did you mean `variance`",
        ),
        ("bai_ts", {"variance": "log"}, "variance of the rule bai_ts is 'log'; give one of logits, "),
        (
            "passive",
            {"variance": "logits"},
            "the rule passive has no option 'variance'; it has none; remove it",
        ),
    ],
)
def test_a_rule_that_is_not_there_is_refused(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=r"^explorer\.rule: ") as raised:
        find_rule(name, options)
    assert said in str(raised.value)


RULE_FILE = """
import numpy as np

def rule(rewards_MBG, valid_BG, generator, *, by=1):
    {body}
"""


def users(folder: Any, body: str, **options: Any) -> Any:
    (folder / "mine.py").write_text(RULE_FILE.format(body=body), encoding="utf-8")
    return find_rule(f"{folder / 'mine.py'}:rule", options)


def test_a_users_rule_is_called_with_its_options(tmp_path: Any) -> None:
    rule = users(tmp_path, "return np.array([[0, by]] * len(valid_BG))", by=2)
    assert call_rule(rule, REWARDS, EVERY, np.random.default_rng(0)).tolist() == [[0, 2]]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return None", "returned None for 1 prompts; return the indices of two candidates"),
        ("return [[0.0, 1.0]]", "an integer array of shape (1, 2)"),
        ("return [[0, 1], [0, 1]]", "for 1 prompts"),
        ("return [[0, -1]]", "chose (0, -1) for a prompt whose candidates are [0, 1, 2]"),
        ("return [[0, 3]]", "chose (0, 3) for a prompt whose candidates are [0, 1, 2]"),
        ("return [[0, 99]]", "chose (0, 99)"),
        ("raise ValueError('no')", "raised ValueError: no (line 5 of mine.py)"),
        ("rewards_MBG[:] = np.nan; return 1", "returned 1 for 1 prompts"),
    ],
)
def test_a_users_rule_that_breaks_the_contract_is_named(tmp_path: Any, body: str, said: str) -> None:
    rule, valid_BG = users(tmp_path, body), np.array([[True, True, True, False]])
    rewards = REWARDS.copy()
    with pytest.raises(ContractError, match=r"^explorer\.rule: .*mine\.py:rule ") as raised:
        call_rule(rule, rewards, valid_BG, np.random.default_rng(0))
    assert said in str(raised.value)
    assert (rewards == REWARDS).all()
