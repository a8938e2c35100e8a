"""Forms of a question for models that were not tuned to follow instructions. A form consists of an
instruction, worked examples, the question, and a cue, after which the answer begins. The examples were
written for this package.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oat.errors import TemplateError
from oat.types import Message


@dataclass(frozen=True)
class Example:
    """A worked example.

    Attributes:
        worked: the complete response to `question`, with the final answer in it.
        answer: the final answer alone.
    """

    question: str
    worked: str
    answer: str


@dataclass(frozen=True)
class Form:
    """The parts of one form.

    Attributes:
        instruction: the first text of a prompt; it says how to give an answer.
        before: the word before each question, such as "Question:".
        cue: the word after each question, such as "Answer:".
        examples: worked examples; a prompt shows the first `few_shot` of them.
        stop: strings that end a response, such as the beginning of a further question.
    """

    instruction: str
    before: str
    cue: str
    examples: tuple[Example, ...]
    stop: tuple[str, ...]

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> "Form":
        """Return the form of which `dataclasses.asdict` made `plain`."""
        examples = tuple(Example(**each) for each in plain["examples"])
        return cls(**{**plain, "examples": examples, "stop": tuple(plain["stop"])})

    def render(self, question: str, few_shot: int = 0) -> str:
        """Return the text that a model continues. It ends with the cue, without a space after the cue.

        Args:
            few_shot: number of worked examples to show, from 0 to `len(examples)`.
        """
        assert 0 <= few_shot <= len(self.examples), "checked with the configuration"
        shown = [
            f"{self.before} {example.question}\n{self.cue} {example.worked}"
            for example in self.examples[:few_shot]
        ]
        return "\n\n".join([self.instruction, *shown, f"{self.before} {question.strip()}\n{self.cue}"])

    def put(self, messages: Sequence[Message], few_shot: int = 0) -> list[Message]:
        """Return a conversation with its user message put into this form.

        Raises:
            TemplateError: a message has a wrong role. The last message must be the user's, and all messages
                before it must be system messages.
        """
        *before, last = messages
        if last.role != "user" or any(message.role != "system" for message in before):
            roles = ", ".join(message.role for message in messages)
            raise TemplateError(
                f"a conversation of {roles} is not one question, which `question` puts in a form; remove "
                "`render.question`"
            )
        return [*before, Message("user", self.render(last.content, few_shot))]


GSM8K = Form(
    "Answer each question step by step. End with #### and the number.",
    "Question:",
    "Answer:",
    (
        Example(
            (
                "A baker puts 4 rolls into each of 7 bags and has 3 rolls left over. How many rolls did she "
                "bake?"
            ),
            "The bags hold 4 * 7 = 28 rolls. With those left over there are 28 + 3 = 31 rolls.\n#### 31",
            "31",
        ),
        Example(
            "Tickets cost $8 for adults and $5 for children. What do 2 adults and 3 children pay?",
            (
                "The adults pay 2 * 8 = 16 dollars and the children 3 * 5 = 15 dollars. Together that is 16 "
                "+ 15 = 31 dollars, so they pay $31.\n#### 31"
            ),
            "31",
        ),
        Example(
            (
                "A tank holds 90 litres. A third of it is used for the garden, then 12 litres for the car. "
                "How many litres are left?"
            ),
            (
                "The garden takes 90 / 3 = 30 litres, which leaves 90 - 30 = 60. After the car 60 - 12 = 48 "
                "litres are left.\n#### 48"
            ),
            "48",
        ),
        Example(
            (
                "Nora reads 15 pages on Monday and twice as many on Tuesday. Her book has 100 pages. How "
                "many pages are left to read?"
            ),
            (
                "On Tuesday she reads 2 * 15 = 30 pages. She has read 15 + 30 = 45 pages, so 100 - 45 = 55 "
                "are left.\n#### 55"
            ),
            "55",
        ),
        Example(
            "A train leaves at 9:20 and arrives at 11:05. How many minutes does it travel?",
            (
                "From 9:20 to 11:20 it would be 2 * 60 = 120 minutes. It arrives 15 minutes earlier: 120 - "
                "15 = 105.\n#### 105"
            ),
            "105",
        ),
        Example(
            (
                "Three friends share 2 boxes of 24 plums and 6 single plums equally. How many plums does "
                "each get?"
            ),
            (
                "The boxes hold 2 * 24 = 48 plums, and with the single ones there are 48 + 6 = 54. Each gets "
                "54 / 3 = 18.\n#### 18"
            ),
            "18",
        ),
        Example(
            "A coat of $80 is sold at 25% off. A scarf costs $12. What do both cost now?",
            (
                "The coat is reduced by 80 * 0.25 = 20 dollars to 80 - 20 = 60 dollars. Both cost 60 + 12 = "
                "72 dollars.\n#### 72"
            ),
            "72",
        ),
        Example(
            "Omar saves $6 a week. He has $14 and wants a game of $50. For how many weeks must he save?",
            "He still needs 50 - 14 = 36 dollars. That takes 36 / 6 = 6 weeks.\n#### 6",
            "6",
        ),
    ),
    ("\n\nQuestion",),
)

MATH = Form(
    "Solve each problem. Put the final answer into \\boxed{}.",
    "Problem:",
    "Solution:",
    (
        Example(
            "What is the domain of the function $f(x) = \\frac{1}{\\sqrt{x - 3}}$? Write it as an interval.",
            (
                "The root needs $x - 3 \\ge 0$, and it may not be zero, since we divide by it. So $x > 3$, "
                "which is the interval $\\boxed{(3,\\infty)}$."
            ),
            "(3,\\infty)",
        ),
        Example(
            "How many positive divisors does $72$ have?",
            "We factor $72 = 2^3 \\cdot 3^2$. A divisor takes $2$ from $0$ to $3$ times and $3$ from $0$ "
            "to $2$ times, which is "
            "$4 \\cdot 3 = \\boxed{12}$.",
            "12",
        ),
        Example(
            "If $3x + 2y = 12$ and $x = 2y$, what is $x$?",
            "Since $2y = x$, the first equation says $3x + x = 12$, so $4x = 12$ and $x = \\boxed{3}$.",
            "3",
        ),
        Example(
            "A line passes through $(1, 4)$ and $(5, 1)$. What is its slope?",
            "The slope is $\\frac{1 - 4}{5 - 1} = \\boxed{-\\frac{3}{4}}$.",
            "-\\frac{3}{4}",
        ),
    ),
    ("\n\nProblem",),
)

COUNTDOWN = Form(
    (
        "Make the target from the numbers, each used exactly once, with + - * / and brackets. Put the "
        "expression into <answer> and </answer>."
    ),
    "Question:",
    "Answer:",
    (
        Example(
            "Make 24 from the numbers 4, 6, 1.",
            "4 * 6 is 24 already, and 24 * 1 stays 24. <answer>4 * 6 * 1</answer>",
            "4 * 6 * 1",
        ),
        Example(
            "Make 10 from the numbers 3, 5, 8, 4.",
            (
                "8 - 4 = 4 leaves 3 and 5. 5 - 3 = 2 and 4 * 2 = 8 is too little; 3 + 5 = 8, and 8 + 8 / 4 = "
                "10. <answer>3 + 5 + 8 / 4</answer>"
            ),
            "3 + 5 + 8 / 4",
        ),
        Example(
            "Make 36 from the numbers 7, 2, 4.",
            "7 + 2 = 9 and 9 * 4 = 36. <answer>(7 + 2) * 4</answer>",
            "(7 + 2) * 4",
        ),
    ),
    ("\n\nQuestion",),
)

FORMS = {"gsm8k": GSM8K, "math": MATH, "countdown": COUNTDOWN}
