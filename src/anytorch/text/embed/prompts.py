"""The text put before each text: a prompt of the model by its name, or any text."""

from __future__ import annotations

import threading
import warnings

from anytorch.devices.choose import callers_level
from anytorch.errors import UsageError
from anytorch.text.embed.recipe import Recipe

# What a model's prompts are called for the two sides of a search.
NAMES = {"query": ("query",), "passage": ("passage", "document", "corpus")}
NAMES["document"] = NAMES["passage"]
MOST_TOLD = 32  # odd prompts that are warned about; clients of a service may send any number of them


class Prompts:
    """The prompts of a recipe. Thread-safe."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._lock = threading.Lock()
        self._told: set[str] = set()  # odd prompts that were warned about

    def text(self, prompt: str | None) -> str:
        """The prompt for a name of one of the model's prompts, for None its default, else `prompt` itself."""
        if prompt is not None and not isinstance(prompt, str):
            raise UsageError(f"prompt={prompt!r}: use the name of one of the model's prompts, or a text")
        prompts = self._recipe.prompts
        text = prompts.get(self._recipe.default_prompt or "", "") if prompt is None else prompt
        if prompt is not None:
            known = [name for name in (prompt, *NAMES.get(prompt, ())) if name in prompts]
            if known:
                text = prompts[known[0]]
            elif prompt in NAMES:
                text = ""  # a model without prompts treats both sides alike
            elif looks_like_a_name(prompt):
                self._warn(prompt)
        if text and not self._recipe.pool_prompt:
            raise UsageError(
                "this model leaves its prompt's tokens out of the pooling, which is not supported",
                hint='encode without a prompt: prompt=""',
            )
        return text

    def _warn(self, prompt: str) -> None:
        """Warn once about each single word, which is more often a mistyped name than a prompt.

        Python keeps each text that was warned about, too: after MOST_TOLD of them no more is said or kept.
        """
        with self._lock:
            if prompt in self._told or len(self._told) >= MOST_TOLD:
                return
            self._told.add(prompt)
        known = ", ".join(self._recipe.prompts) or "none"
        warnings.warn(
            f"unknown prompt name {prompt!r}; known: {known}. It is put before every text as it is: if that is intended, "
            "end it with a space or a colon",
            stacklevel=callers_level(),
        )


def looks_like_a_name(prompt: str) -> bool:
    """One word of letters, digits, hyphens and underscores: "query", not "query: ".

    >>> looks_like_a_name("qurey"), looks_like_a_name("query: "), looks_like_a_name("")
    (True, False, False)
    """
    return prompt.replace("-", "_").isidentifier()
