"""Online alignment of a language model in one file, without a framework. Read it from top to bottom.

A language model computes the probabilities of the next token from the tokens so far. Online alignment repeats
four actions:

    sample   let the model answer some prompts, several times each
    score    ask how good each answer is: here a rule, elsewhere a reward model, a judge, or a person
    loss     compute a number that falls when good answers become more probable, and bad answers less probable
    update   move the weights a little against the gradient of the loss; the new weights give the next answers

The model here is tiny and has random weights, so its first answers are random letters. It never sees a right
answer. It still learns to repeat the letter of the prompt, because it sometimes says this letter by chance
and is rewarded. `python examples/00_loop.py` takes some seconds on one thread.

The loss is that of GRPO (DeepSeekMath, arXiv:2402.03300). Real runs use `oat train`, which adds checkpoints,
budgets, other oracles and large models. With the following settings, `oat train` has the same losses as this
file; a test compares them:

    model: {path: model}                              # what `make_model` makes
    prompts: {path: prompts.jsonl, shuffle: false}    # PROMPTS
    sampling: {max_new_tokens: 4}
    oracle: {name: "examples/00_loop.py:reward"}
    algorithm: {name: grpo, prompts: 8, samples: 16, epochs: 2, reduction: token}
    learner: {learning_rate: 5e-3}
    stop: {max_steps: 40}

Axes, as suffixes of names: B prompts, G answers per prompt, N = B * G answers, L tokens so far, T tokens of
an answer, V vocabulary.

The loop draws tokens with `oat.seeds` at the addresses that a run uses, so the losses can be compared. The
loop makes two passes over its samples. In the first pass, every ratio of probabilities is 1, and the clip has
no effect. The second pass shows the effect of the clip.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from oat.functional.advantages import group_advantages
from oat.functional.logprobs import token_logps
from oat.functional.policy import clipped_policy_loss
from oat.functional.sampling import inverse_cdf
from oat.seeds import Seeds, uniforms

LETTERS = "abcdefgh"
PROMPTS = [f"{letter}=" for letter in LETTERS]
"""All prompts have the same length, so they need no padding."""
END = "<end>"
G, T = 16, 4
STEPS = 40
EPOCHS = 2
LEARNING_RATE = 5e-3
CLIP = 0.2


def make_model() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Make a Llama of 21 thousand parameters with random weights, and a tokenizer of single characters."""
    vocabulary = {token: id for id, token in enumerate([END, "=", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(vocabulary), eos_token_id=vocabulary[END], **shape))
    return model, PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def reward(prompts: Sequence[str], completions: Sequence[str], **columns: object) -> list[float]:
    """Return the reward of each answer: the number of times that it has the prompt's letter, divided by 4."""
    return [text.count(prompt[0]) / T for prompt, text in zip(prompts, completions, strict=True)]


@torch.no_grad()
def sample(model: LlamaForCausalLM, prompts_BL: Tensor, keys_N: np.ndarray, end: int) -> Tensor:
    """Sample G answers per prompt, token by token. Return (N, T) ids; only end tokens follow an end token.

    Each token is drawn with one uniform number: it is the token at which the cumulative probability reaches
    this number. The number depends only on the answer's key and the token's position. So a run can be
    repeated exactly, and the order in which its answers are sampled does not matter.
    """
    ids_NL = prompts_BL.repeat_interleave(G, dim=0)
    is_over_N = torch.zeros(len(ids_NL), dtype=torch.bool)
    for _ in range(T):
        logits_NV = model(ids_NL).logits[:, -1]
        uniforms_N = torch.from_numpy(uniforms(keys_N, np.full(len(ids_NL), ids_NL.shape[1])))
        next_N = inverse_cdf(logits_NV, uniforms_N).masked_fill(is_over_N, end)
        ids_NL = torch.cat([ids_NL, next_N[:, None]], dim=1)
        is_over_N |= next_N == end
    return ids_NL[:, prompts_BL.shape[1] :]


def logps_of(model: LlamaForCausalLM, prompts_BL: Tensor, answers_NT: Tensor) -> Tensor:
    """Return the log-probabilities of the answers' tokens, (N, T). The logits at a position predict the token
    at the next position."""
    ids_NL = torch.cat([prompts_BL.repeat_interleave(G, dim=0), answers_NT], dim=1)
    logits_NTV = model(ids_NL).logits[:, prompts_BL.shape[1] - 1 : -1]
    return token_logps(logits_NTV.flatten(0, 1), answers_NT.flatten()).view_as(answers_NT)


def train(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int = STEPS, seed: int = 0
) -> Iterator[dict[str, object]]:
    """Train the model. After each step, yield a dict with the step's loss, the norm of its gradient, its mean
    reward, and the texts of its answers, G per prompt."""
    seeds = Seeds(seed)
    end = tokenizer.eos_token_id
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    prompts_BL = torch.tensor(tokenizer(PROMPTS)["input_ids"])
    group_of_N = torch.arange(len(PROMPTS)).repeat_interleave(G)
    for step in range(steps):
        # Sample. Each answer has an address: the step, the prompt's occurrence (the number of prompts that
        # the run took before it), and the answer's number.
        taken = range(step * len(PROMPTS), (step + 1) * len(PROMPTS))
        addresses = [(occurrence, answer) for occurrence in taken for answer in range(G)]
        keys = [seeds.key("train", step, 0, "sampler", *address) for address in addresses]
        answers_NT = sample(model, prompts_BL, np.array(keys, dtype=np.uint64), end)
        texts = tokenizer.batch_decode(answers_NT, skip_special_tokens=True)

        # Score. The advantage compares an answer with all G answers to its prompt:
        # (reward - mean) / standard deviation. It is above 0 if the answer is better than the mean.
        rewards_N = torch.tensor(reward([prompt for prompt in PROMPTS for _ in range(G)], texts))
        advantages_N = group_advantages(rewards_N, group_of_N, len(PROMPTS))

        # Mask. An answer's tokens up to its first end token count. Later tokens do not.
        is_end_NT = (answers_NT == end).long()
        mask_NT = (is_end_NT.cumsum(1) - is_end_NT == 0).float()
        with torch.no_grad():
            old_logps_NT = logps_of(model, prompts_BL, answers_NT)

        # Loss and update. A token's term is -advantage * ratio. The ratio is the token's probability now,
        # divided by its probability when it was sampled. So the loss falls when the tokens of good answers
        # become more probable, and the tokens of bad answers less probable. Each batch of answers is used for
        # EPOCHS updates. In the first update, every ratio is 1. In the second, a token has no gradient if its
        # ratio has moved away from 1 by more than CLIP in the direction of the advantage.
        losses, norms = [], []
        for _ in range(EPOCHS):
            logps_NT = logps_of(model, prompts_BL, answers_NT)
            terms_NT, _ = clipped_policy_loss(
                logps_NT,
                old_logps_NT,
                advantages_N[:, None].expand_as(logps_NT),
                clip_low=CLIP,
                clip_high=CLIP,
            )
            loss = (terms_NT * mask_NT).sum() / mask_NT.sum()
            optimiser.zero_grad()
            loss.backward()
            # clipping the gradient's norm limits the step of an unusual batch
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimiser.step()
            losses.append(loss.item())
        yield {
            "loss": sum(losses) / EPOCHS,
            "grad_norm": sum(norms) / EPOCHS,
            "reward": rewards_N.mean().item(),
            "texts": texts,
        }


def main() -> None:
    torch.set_num_threads(1)
    model, tokenizer = make_model()
    for step, done in enumerate(train(model, tokenizer)):
        if step % 10 == 0 or step == STEPS - 1:
            answers = "  ".join(
                f"{prompt}{text or '(nothing)'}"
                for prompt, text in zip(PROMPTS, done["texts"][::G], strict=True)
            )
            print(f"step {step:2}  loss {done['loss']:+.3f}  reward {done['reward']:.2f}   {answers}")
    print(
        "\nThe loss stays near 0 throughout: advantages are measured against the mean, which rises with the "
        "model. Watch the reward."
    )


if __name__ == "__main__":
    main()
