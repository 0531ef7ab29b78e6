"""``chunked_loss``: a loss that a trainer computes outside of the model, in the same program.

A program that ends in logits must hand them out whole: at 128K tokens and a vocabulary of 128K they
are 32 GiB in bfloat16. With the loss in the program they exist for one piece of the sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor, nn

from .api import optimize
from .backend import optimized_backend

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def chunked_loss(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    *,
    only_loss: Collection[str] = ("labels",),
    **options: Any,
) -> ChunkedLoss:
    """A module that computes ``loss_fn(model(...), ...)`` in chunks of the sequence.

        def dpo_loss(logits, labels, beta): ...

        loss = fpdt_compile.chunked_loss(model, dpo_loss, chunk_len=4096)
        loss(input_ids=ids, attention_mask=mask, labels=labels, beta=0.1).backward()

    The first parameter of ``loss_fn`` is what the model returns; if it is called ``logits`` and the
    model returns an object with that attribute, it is ``output.logits`` ([B, S, V]). Every keyword
    of a call goes to whoever names it as a parameter: the model's ``forward``, ``loss_fn``, or
    both. Names in ``only_loss`` that ``loss_fn`` takes do not go to the model, so that it does not
    compute a loss of its own. Other names go to a ``**kwargs`` of the model, else of ``loss_fn``.

    Returned is what ``loss_fn`` returns: a scalar, or a tuple or dict with one. Parameters are the
    model's own, the model is not compiled or changed, and its state_dict is what it was: save the
    model, not this module. A ``loss_fn`` that is a module has its parameters trained too.

    ``options`` are those of :func:`optimize`; ``token_dims`` may name inputs of either. Raises
    ValueError for a bad option, a model that is optimized already, a ``loss_fn`` without a
    parameter for the output, and, at a call, for a keyword that nobody takes or one ``loss_fn``
    misses.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model={type(model).__name__}: allowed is a torch.nn.Module")
    if optimized_backend(model) is not None:
        raise ValueError(
            f"model={type(model).__name__}: is optimized already; allowed is the plain model, "
            "chunked_loss(model, loss_fn) compiles the model and the loss together"
        )
    if not callable(loss_fn):
        raise ValueError(f"loss_fn={loss_fn!r}: allowed is a function or a module")
    if isinstance(only_loss, str):
        raise ValueError(f"only_loss={only_loss!r}: allowed is a tuple of names")
    module = ChunkedLoss(model, loss_fn, frozenset(only_loss))
    module.check_names("only_loss", only_loss, module.loss_names)
    token_dims = options.get("token_dims")
    if isinstance(token_dims, Mapping) and not module.model_takes_any:
        known = (*module.model_names, *module.loss_names)
        module.check_names("token_dims", token_dims, known)
    optimize(module, **options)
    return module


class ChunkedLoss(nn.Module):
    """The module :func:`chunked_loss` returns; called with keywords only."""

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Any], only_loss: frozenset[str]
    ) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.only_loss = only_loss
        self.train(model.training)
        target = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
        parameters = list(inspect.signature(target).parameters.values())
        if not parameters or parameters[0].kind not in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        ):
            raise ValueError(
                f"loss_fn={loss_fn!r}: its first parameter must take the model's output"
            )
        self.wants_logits = parameters[0].name == "logits"
        self.loss_names, self.loss_takes_any = names_of(parameters[1:])
        self.required = tuple(
            p.name
            for p in parameters[1:]
            if p.kind in NAMED and p.default is inspect.Parameter.empty
        )
        self.model_names, self.model_takes_any = names_of(
            inspect.signature(model.forward).parameters.values()
        )

    @property
    def config(self) -> Any:
        """The model's configuration, if it has one."""
        return getattr(self.model, "config", None)

    def forward(self, **kwargs: Any) -> Any:
        """``loss_fn`` of the model's output; see :func:`chunked_loss`."""
        for_model, for_loss = self.divide(kwargs)
        output = self.model(**for_model)
        if self.wants_logits and not isinstance(output, Tensor):
            output = output["logits"] if isinstance(output, dict) else output.logits
        return self.loss_fn(output, **for_loss)

    def divide(
        self, kwargs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments of the model and of ``loss_fn``."""
        for_model: dict[str, Any] = {}
        for_loss: dict[str, Any] = {}
        for name, value in kwargs.items():
            in_loss, in_model = name in self.loss_names, name in self.model_names
            if in_loss:
                for_loss[name] = value
            if in_model and not (in_loss and name in self.only_loss):
                for_model[name] = value
            if in_loss or in_model:
                continue
            if self.model_takes_any:
                for_model[name] = value
            elif self.loss_takes_any:
                for_loss[name] = value
            else:
                raise ValueError(
                    f"{name}=...: neither the model nor loss_fn takes it; allowed are "
                    f"{', '.join((*self.model_names, *self.loss_names))}"
                )
        missing = [name for name in self.required if name not in for_loss]
        if missing:
            raise ValueError(
                f"{', '.join(missing)}: missing; loss_fn takes {', '.join(self.loss_names)}"
            )
        return for_model, for_loss

    def check_names(
        self, option: str, names: Collection[str], allowed: Collection[str]
    ) -> None:
        """Names given in an option must be parameters (the default ``labels`` need not)."""
        for name in names:
            if name not in allowed and (option, name) != ("only_loss", "labels"):
                raise ValueError(
                    f"{option}={names!r}: {name!r} is not a parameter; allowed are "
                    f"{', '.join(allowed)}"
                )


def names_of(parameters: Any) -> tuple[tuple[str, ...], bool]:
    """Names that can be given as keywords, and whether any other can."""
    parameters = list(parameters)
    names = tuple(p.name for p in parameters if p.kind in NAMED)
    return names, any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
