r"""Answers of the kind that the test problems of MATH have (MATH-500), written by hand: each in several ways
that are one answer, beside wrong ones.

The first of each is how the data set writes such an answer.
"""

from math_structures import MATRICES, RELATIONS, SEVERAL

NUMBERS = [
    (
        [
            "15 \\text{ inches}",
            "15 inches",
            "15",
            "15 in",
            "15 square inches",
            r"15\ \mathrm{in}^2",
            "15cm",
            "15 cm^2",
        ],
        ["15x", "51", "15i"],
    ),
    (["40 \\text{ miles per hour}", "40 mph", "40", r"40\,\text{mph}"], ["4", "14"]),
    (
        [
            "27",
            "27.0",
            "27.",
            r"\,27",
            r"{27}",
            r"27\,",
            r"+27",
            r"\mathbf{27}",
            r"\text{27}",
            r"x = 27",
            r"$27$",
            r"\frac{54}{2}",
        ],
        ["-27", "72", "2", "7", "27.1", "27x"],
    ),
    (["-50", r"- 50", "\u221250", r"-50.0", r"{-50}", r"(-50)", r"\left( -50 \right)"], ["50", "-5", "-500"]),
    (
        ["2220", "2,220", r"2{,}220", r"2\,220", r"2,\!220", r"2\!220", r"2~220"],
        ["222", "2.220", "2, 220, 0"],
    ),
    (
        ["1,073,741,824", "1073741824", r"1{,}073{,}741{,}824", "2^{30}"],
        ["1,073,741,823", "2^{31}", "1,073,741"],
    ),
    (
        ["0.09", ".09", "0.090", r"\frac{9}{100}", "9/100", r"9 \times 10^{-2}", r"9\cdot10^{-2}"],
        ["0.9", "0.009", "9"],
    ),
    (
        ["12.5", r"12.50", r"\frac{25}{2}", r"12\frac{1}{2}", r"12 \tfrac12", r"12\frac12", "25/2"],
        ["12", "6", "1.25", r"\frac{2}{25}"],
    ),
    (
        [
            "-\\frac{35}{9}",
            r"\frac{-35}{9}",
            r"\frac{35}{-9}",
            r"-\dfrac{35}{9}",
            "-35/9",
            r"-3\frac{8}{9}",
            r"{-\frac{35}{9}}",
        ],
        [r"\frac{35}{9}", r"-\frac{9}{35}", "-3.89", r"-3\frac{7}{9}"],
    ),
    (
        [
            r"1\frac{4}{5}",
            r"1 \frac{4}{5}",
            r"1\dfrac{4}{5}",
            r"1\tfrac45",
            r"\frac{9}{5}",
            "9/5",
            "1.8",
            r"1\ \frac{4}{5}",
            "1 4/5",
        ],
        [r"\frac{4}{5}", r"1\frac{3}{5}", r"\frac{14}{5}", "14/5"],
    ),
    (
        [
            r"\frac{243}{625}",
            r"\dfrac{243}{625}",
            r"\frac{3^5}{5^4}",
            "243/625",
            "0.3888",
            r"\left(\frac{3}{5}\right)^5 \cdot 5",
            r"{243 \over 625}",
        ],
        [r"\frac{625}{243}", r"\frac{24}{625}", "0.388"],
    ),
    (
        [
            r"\frac{1}{8}",
            r"\frac18",
            r"\frac {1}{8}",
            r"\frac1{8}",
            r"\frac{1}8",
            "1/8",
            "0.125",
            "2^{-3}",
            r"\frac{ 1 }{ 8 }",
        ],
        ["8", r"\frac{1}{18}", "18", "0.12"],
    ),
    (["10\\%", "10%", r"10 \%", r"10\% ", r"10\text{ percent}", r"10 \text{%}"], ["1\\%", "100\\%", "11"]),
    (
        [
            "\\$18.90",
            "18.90",
            r"\$ 18.90",
            r"18.9",
            "$18.90",
            r"\text{\$}18.90",
            r"18.90 \text{ dollars}",
            r"\$18.90 \text{ dollars}",
        ],
        ["18.09", "1890", "1.89"],
    ),
    (["\\$36{,}000", "36,000", "36000", r"\$36,000"], ["3600", "36", "36, 0"]),
    (
        [
            "5.4 \\text{ cents}",
            "5.4",
            r"5.4\text{ cents}",
            r"5.4\,\text{cents}",
            r"5.40\mbox{ cents}",
            r"5.4\ \mathrm{cents}",
            r"5.4 \textrm{ cents}",
        ],
        ["5.3", "54", r"4.5 \text{ cents}"],
    ),
    (
        [
            "15\\mbox{ cm}^2",
            "15",
            r"15 \text{ cm}^2",
            r"15\text{ cm}^{2}",
            r"15\,\mathrm{cm}^2",
            r"15 \text{ cm}^{2}.",
            r"15 \text{ square cm}",
            r"15\ \text{cm}^2",
            r"15 \,\text{cm}\,^2",
        ],
        ["225", "51", "1.5", r"16\mbox{ cm}^2"],
    ),
    (["864 \\mbox{ inches}^2", "864", r"864\text{ in}^2", r"864\text{ square inches}"], ["86", "865"]),
    (
        [
            "\\frac{270}7\\text{ degrees}",
            r"\frac{270}{7}",
            r"\frac{270}{7}^\circ",
            r"\left(\frac{270}{7}\right)^\circ",
            r"38\frac{4}{7}",
            r"\dfrac{270}{7}^{\circ}",
            r"\frac{270}{7} \text{ degrees}",
        ],
        [r"\frac{7}{270}", "270", r"\frac{27}{7}"],
    ),
    (
        [
            "90^\\circ",
            "90",
            r"90^{\circ}",
            r"90\degree",
            "90\u00b0",
            r"90 ^ \circ",
            r"90\text{ degrees}",
            r"90^\circ.",
            r"\angle ABC = 90^\circ",
        ],
        ["9", "900", "180", "45^\\circ"],
    ),
    (
        [
            "2516_8",
            "2516_{8}",
            r"2516_{\text{8}}",
            "2516_ 8",
            r"2516_{ 8 }",
            r"(2516)_8",
            r"2516_{\text{eight}}",
        ],
        ["2516", "2516_9", "1358", "2615_8"],
    ),
    (["4210_{5}", "4210_5"], ["4210", "421_5", "555"]),
    (
        ["11111111100_2", "11111111100_{2}", r"11111111100_{\text{two}}"],
        ["2044", "11111111100", "11111111101_2"],
    ),
    (["10!", "3628800", "3,628,800"], ["10", "9!"]),
    ([r"\binom{10}{3}", r"\dbinom{10}{3}", "120", r"{10 \choose 3}"], [r"\binom{10}{2}", "12"]),
    (["6.25 \\times 10^{5}", r"6.25\cdot 10^5", "625000", "625,000"], ["6.25", r"6.25 \times 10^{4}"]),
    (
        ["0.\\overline{36}", r"0.\overline{36}", r"\frac{4}{11}", r"0.\overline{3636}"],
        ["0.36", r"0.\overline{63}", "36"],
    ),
    (["7:30", r"7{:}30", r"7:30 \text{ p.m.}"], ["7:13", "730"]),
]

EXPRESSIONS = [
    (["3t", "3 t", r"3\cdot t", "t + 2t"], ["3", "3h", "t", "3t^2"]),
    ([r"2^5 h", r"32h", r"32 h"], ["32", "2^5"]),
    (
        [r"\frac{1}{2}bh", r"\frac{bh}{2}", "0.5 b h", r"\dfrac{b h}{2}"],
        [r"\frac{1}{2}b", r"\frac{1}{2}", "bh"],
    ),
    ([r"\pi r^2 h", r"\pi r^{2}h", r"h \pi r^2", r"\pi\cdot r^2\cdot h"], [r"\pi r^2", r"\pi r h"]),
    (
        [r"\frac{\pi}{6} + 2k\pi", r"\frac{\pi}{6}+2\pi k", r"2 k \pi + \frac{\pi}{6}"],
        [r"\frac{\pi}{6}+k\pi", r"\frac{\pi}{3}+2k\pi"],
    ),
    ([r"5^{x+1}", r"5 \cdot 5^x", r"5^{1+x}", r"5^{ x + 1 }"], ["5^x", "5^x+1"]),
    ([r"\arctan 2", r"\tan^{-1} 2", r"\arctan(2)"], [r"\tan 2", r"\arctan 3"]),
    (
        [
            r"3\sqrt{13}",
            r"3 \sqrt{13}",
            r"3\cdot\sqrt{13}",
            r"\sqrt{117}",
            r"\sqrt{13}\cdot 3",
            r"3 \times \sqrt {13}",
            r"3\sqrt{(13)}",
        ],
        [r"3\sqrt{3}", r"13\sqrt{3}", r"\sqrt{13}", "3"],
    ),
    (
        [r"11\sqrt2", r"11\sqrt{2}", r"11 \sqrt 2", r"\sqrt{242}", r"11\sqrt {2}", r"11*\sqrt{2}"],
        [r"11\sqrt3", r"\sqrt{11}", "11"],
    ),
    (
        [r"\sqrt[3]{4}", r"4^{1/3}", r"4^{\frac{1}{3}}", r"\sqrt[3] {4}", r"\sqrt[3]4"],
        [r"\sqrt{4}", r"\sqrt[4]{3}", "2"],
    ),
    (
        [
            r"\frac{3 \sqrt{3}}{4}",
            r"\frac{3\sqrt3}4",
            r"\frac{3}{4}\sqrt{3}",
            r"3\sqrt{3}/4",
            r"\dfrac{3\sqrt{3}}{4}",
            r"\frac{9}{4\sqrt{3}}",
        ],
        [r"\frac{3\sqrt{3}}{2}", r"\frac{\sqrt{3}}{4}"],
    ),
    (
        [
            r"\frac{\sqrt{21}}{5}",
            r"\frac{\sqrt{21}} 5",
            r"\sqrt{21}/5",
            r"\frac15\sqrt{21}",
            r"\sqrt{\frac{21}{25}}",
        ],
        [r"\frac{21}{5}", r"\frac{\sqrt{12}}{5}"],
    ),
    ([r"\pi", r"{\pi}", r"1\pi", r"\pi."], ["3.14", r"2\pi", "p"]),
    ([r"12\pi", r"12 \pi", r"\pi \cdot 12", r"12\pi\text{ cm}^2", r"12{\pi}"], [r"12", r"21\pi", r"\pi"]),
    (
        [r"\frac{3\pi}{4}", r"\frac{3}{4}\pi", r"3\pi/4", r"\dfrac{3 \pi}{4}", r"0.75\pi"],
        [r"\frac{\pi}{4}", r"\frac{4\pi}{3}", r"\frac{3}{4}"],
    ),
    (["p - q", "p-q", "-q+p", "-(q-p)"], ["q-p", "p+q", "p"]),
    (["6 - 5i", "6-5i", "-5i+6", "6 - 5 i", r"6-5\mathrm{i}", r"6 - i5"], ["6+5i", "5-6i", "6", "-5i"]),
    (["-2 + 7i", "-2+7i", "7i-2", "7i - 2"], ["-2-7i", "2+7i"]),
    (
        ["x^3 + 3x - 6", "x^{3}+3x-6", "3x+x^3-6", "x^3-6+3x", "x^{3} + 3 x - 6"],
        ["x^3+3x+6", "x^2+3x-6", "x^3-3x-6"],
    ),
    (["6r^2-4r-24", "6r^{2}-4r-24", "2(3r^2-2r-12)", "-24-4r+6r^2"], ["6r^2-4r+24", "6x^2-4x-24"]),
    (
        ["y^4-2y^3+7y^2+y-5", "y^{4}-2y^{3}+7y^{2}+y-5", "-5+y+7y^2-2y^3+y^4"],
        ["y^4-2y^3+7y^2+y+5", "y^4+2y^3+7y^2+y-5"],
    ),
    (
        [
            "(x - 5)(x + 5)",
            "(x-5)(x+5)",
            "(x+5)(x-5)",
            r"(x-5)\cdot(x+5)",
            "x^2-25",
            r"\left(x-5\right)\left(x+5\right)",
        ],
        ["(x-5)^2", "x^2+25", "x-5"],
    ),
    (
        [
            r"\frac{2 + x}{2 - x}",
            r"\frac{x+2}{2-x}",
            r"-\frac{x+2}{x-2}",
            r"\dfrac{2+x}{2-x}",
            r"(2+x)/(2-x)",
            r"\frac{2+x}{-x+2}",
        ],
        [r"\frac{2-x}{2+x}", r"\frac{x+2}{x-2}"],
    ),
    ([r"\frac{1}{x^2}", "x^{-2}", r"1/x^2", r"\frac{1}{x^{2}}"], [r"x^2", r"\frac{1}{x}"]),
    ([r"2k+2", "2k + 2", "2(k+1)", "2+2k", r"2\left(k+1\right)"], ["2k", "2k+1", "k+1"]),
    ([r"3R^2", "3R^{2}", r"3 R ^ 2", r"3\cdot R^2"], ["3R", "9R^2", "R^2"]),
    (
        [r"\cot x", r"\cot(x)", r"\cot{x}", r"\frac{\cos x}{\sin x}", r"\frac{1}{\tan x}"],
        [r"\tan x", r"\cos x", "x"],
    ),
    ([r"\sin^2 x", r"(\sin x)^2", r"\sin^{2}x", r"1-\cos^2 x"], [r"\sin x", r"\cos^2 x"]),
    (
        [r"\log_2 3", r"\log_{2} 3", r"\log_2{3}", r"\log_2(3)", r"\frac{\ln 3}{\ln 2}"],
        [r"\log_3 2", r"\log 3"],
    ),
    ([r"e^{-x}", r"\frac{1}{e^x}", r"e^{ -x }"], ["e^x", "-e^x"]),
    ([r"2^{2005}", r"2^{ 2005 }", r"2\cdot 2^{2004}"], ["2^{2004}", "2005^2"]),
    ([r"|x-3|", r"\left|x-3\right|", r"\lvert x-3\rvert", r"|x - 3|", r"|3-x|"], ["x-3", "|x+3|"]),
    ([r"\lfloor x \rfloor", r"\left\lfloor x \right\rfloor"], [r"\lceil x \rceil", "x"]),
]

WORDS = [
    ([r"\text{listen}", r"\text{Listen}"], ["silent", r"\text{silent}"]),
    (
        [r"\text{3 hours, 20 minutes}", r"3\text{ hours, }20\text{ minutes}"],
        ["3", "20", r"\text{3 hours, 30 minutes}"],
    ),
    (
        [
            r"\text{Evelyn}",
            "Evelyn",
            r"\text{ Evelyn }",
            r"\mathrm{Evelyn}",
            r"\textbf{Evelyn}",
            r"\text{Evelyn.}",
        ],
        [r"\text{Carla}", "E", ""],
    ),
    (
        [
            r"\text{(C)}",
            "(C)",
            "C",
            r"\textbf{(C)}",
            r"\text{C}",
            r"\boxed{C}",
            r"\mathrm{(C)}",
            r"\text{(C) }",
        ],
        ["(B)", "B", "CC", "c^2"],
    ),
    ([r"\text{even}", "even", r"\text{Even}", r"\mbox{even}", r"\textit{even}"], ["odd", "neither"]),
    ([r"\text{June 20}", "June 20", r"\text{June } 20", r"\text{June}\ 20"], ["June 21", "20"]),
    (
        [r"\text{no solution}", "no solution", r"\text{No solution}", r"\text{no} \text{ solution}"],
        ["0", "solution"],
    ),
    ([r"\text{A, C, D}", "A,C,D", r"\text{A},\text{C},\text{D}", "A, C, D", "D, A, C"], ["A,C", "A,C,E"]),
    ([r"\text{Monday}", "Monday"], ["Tuesday"]),
]

ALL = MATRICES + NUMBERS + EXPRESSIONS + RELATIONS + SEVERAL + WORDS
