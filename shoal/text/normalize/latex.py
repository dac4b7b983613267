r"""Mathematics in LaTeX, as language models write it: `$x^2$`, `\(a \le b\)` and `\[\frac{1}{2}\]`, in words."""

import re

from shoal.text.normalize.fold import GREEK_NAMES

# A formula in single dollar signs has a sign of mathematics or no space: "$5 or 6$" is money.
FORMULA = re.compile(
    r"\$\$(?P<display>[^$]{1,1000})\$\$"
    r"|(?<![\w$\\])\$(?!\s)(?=[^$\n]{0,200}[\\^_=+]|[^$\s]{1,24}\$)(?P<inline>[^$\n]{0,200}[^$\s\\(])\$(?![\w$])"
    r"|\\\[(?P<bracket>[^\[\]]{1,1000}?)\\\]"
    r"|\\\((?P<parenthesis>[^\n]{1,300}?)\\\)"
)
# Braces without braces inside: the innermost ones are read first.
GROUP = r"\s?\{([^{}]{0,300})\}"
WRAPPERS = "text|mathrm|mathbf|mathit|mathbb|mathcal|boxed|operatorname|textbf|textit|vec|hat|bar"
NESTED = (
    (re.compile(rf"\\[dt]?frac{GROUP}{GROUP}"), r" \1 over \2 "),
    (re.compile(r"\\[dt]?frac(\d)(\d)"), r" \1 over \2 "),
    (re.compile(rf"\\sqrt\[3\]{GROUP}"), r" cube root of \1 "),
    (re.compile(rf"\\sqrt{GROUP}"), r" square root of \1 "),
    (re.compile(rf"\\(?:{WRAPPERS}){GROUP}"), r"\1"),
    (re.compile(r"\^(?:\\circ|\{\s?\\circ\s?\})"), " degrees "),
    (re.compile(rf"\^{GROUP}"), r"^\1 "),
    (re.compile(rf"_{GROUP}"), r" \1 "),
)
MAX_DEPTH = 6
COMMANDS = {
    **{name: name for name in (*GREEK_NAMES, "partial", "sin", "cos", "tan", "log", "ln", "exp", "max", "min", "in")},
    **{name.capitalize(): name for name in GREEK_NAMES},
    "times": "times", "cdot": "times", "div": "divided by", "pm": "plus or minus", "mp": "minus or plus",
    "le": "is less than or equal to", "leq": "is less than or equal to", "ge": "is greater than or equal to",
    "geq": "is greater than or equal to", "ne": "is not equal to", "neq": "is not equal to", "lt": "is less than",
    "gt": "is greater than", "approx": "approximately", "sim": "about", "equiv": "is identical to",
    "infty": "infinity", "to": "to", "rightarrow": "to", "Rightarrow": "implies", "implies": "implies",
    "iff": "if and only if", "sum": "sum of", "prod": "product of", "int": "integral of", "lim": "limit of",
    "cup": "union", "cap": "intersection", "subset": "subset of", "notin": "not in", "forall": "for all",
    "exists": "there exists", "angle": "angle", "circ": "degrees", "ldots": ",", "cdots": ",", "dots": ",",
    "varepsilon": "epsilon", "varphi": "phi", "vartheta": "theta", "ell": "l", "hbar": "h bar", "nabla": "nabla",
}  # fmt: skip
COMMAND = re.compile(r"\\([A-Za-z]{1,20})")
SPACING = re.compile(r"\\[,;:! ]|\\\\|[{}&]")
SIGNS = {"-": " minus ", "/": " over ", "*": " times ", "<": " is less than ", ">": " is greater than "}
SIGN = re.compile(r"(?<!\^)-|[/*<>]")


def speak_latex(text: str) -> str:
    """Return the text with formulas between LaTeX's delimiters in words, and loose fractions and roots too."""
    if "\\" not in text and text.count("$") < 2:
        return text
    return _without_groups(FORMULA.sub(lambda match: f" {_formula(match[match.lastgroup or 0])} ", text))


def _formula(formula: str) -> str:
    """Return a formula in words; commands without a reading, such as those of layout, are left out."""
    signed = SIGN.sub(lambda match: SIGNS[match[0]], _without_groups(formula))
    spoken = COMMAND.sub(lambda match: f" {COMMANDS.get(match[1], '')} ", signed)
    return SPACING.sub(" ", spoken).strip()


def _without_groups(text: str) -> str:
    """Replace commands and their arguments, from the inside outwards. A formula nested deeper keeps its braces."""
    for _ in range(MAX_DEPTH):
        if "\\" not in text and "{" not in text:
            break
        for pattern, reading in NESTED:
            text = pattern.sub(reading, text)
    return text
