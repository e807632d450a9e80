"""Still to come; importing it says with what."""

from anytorch_compat import not_yet

raise ImportError(not_yet(__name__, "the virtual device memory and its modes (issue 5)"), name=__name__)
