"""Request preparation: tokenize a request, or refuse it, on the I/O thread or on the prompt threads.

MLX is not used here. The I/O thread and the prompt threads (docs/glossary.md) tokenize prompts at the same time. A lock
is held only while a tokenizer is loaded or a grammar compiled, which the I/O thread never does (`can_prepare_inline`).
An error in one request does not affect other requests. The inference thread checks the memory.
"""

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import structlog

from node.engine.grammar.compiler import CompiledGrammar, GrammarCompiler
from node.engine.grammar.tool_spec import UnsupportedSchema
from node.engine.models.model_descriptor import ModelDescriptor
from node.engine.process.interface import CallRecording
from node.engine.requests.prepared import PreparedRequest
from node.engine.requests.tokenize_admission import count_text_bytes
from node.engine.requests.tool_names import find_tool_names, rename_tools
from node.engine.text.detokenizer import TextPipeline
from node.engine.text.tokenizer import TokenizedPrompt, Tokenizer
from node.engine.text.tokenizer_errors import TemplateFailed, TokenizerError, TooLong
from node.engine.text.tokenizer_loader import FILES, load
from node.engine.text.tokenizer_trial import TokenizerTrials
from node.models.catalogue import ModelCatalogue
from wire.capacity.arithmetic import estimate_tokenize_bytes
from wire.frames import CountTokens, Embed, Finished, Generate, GenerationParams, Refusal
from wire.models.kind import ModelKind, explain_other_kind
from wire.refusals import RefusalCode, Refused

FEATURES = ("grammar", "logprobs", "reasoning", "sampling", "tools")
"""Features that a chat model in this engine may have (`wire.report.Model.features`)."""
log = structlog.get_logger("engine.prompts")


class RequestPreparer:
    """Tokenization of requests for all models. A tokenizer is loaded at the first request for its model, after a trial
    if `trials` is set.

    `context(found)` returns the maximum tokens of a row of a model. `barred(found)` returns why the model cannot be
    used now; empty if it can. `recorder` records the native calls; None: they are not recorded.
    """

    def __init__(
        self,
        catalogue: ModelCatalogue,
        context: Callable[[ModelDescriptor], int] = lambda found: found.context,
        *,
        barred: Callable[[ModelDescriptor], str] = lambda found: found.cause,
        recorder: CallRecording | None = None,
        trials: TokenizerTrials | None = None,
    ) -> None:
        self._catalogue = catalogue
        self._context = context
        self._barred = barred
        self._record_tokenization = _skip_recording if recorder is None else recorder.record_tokenization
        self._trials = trials
        self._tokenizers: dict[str, Tokenizer] = {}
        self._grammars = GrammarCompiler()
        self._loading, self._compiling = threading.Lock(), threading.Lock()

    @property
    def tokenizers(self) -> Mapping[str, Tokenizer]:
        """Loaded tokenizers, by the text `folder:fingerprint` of their model."""
        return self._tokenizers

    def can_prepare_inline(self, frame: Generate | CountTokens | Embed) -> bool:
        """Return whether the I/O thread may prepare this prompt: the prompt is short, needs no lock and has no grammar.
        Return True as well if the model is unknown or its files cannot be used: the answer is then a refusal."""
        found = self._catalogue.find_fresh(frame.model)
        if found is None or found.cause:
            return True
        guided = isinstance(frame, Generate) and frame.params.grammar is not None
        return not guided and _get_key(found) in self._tokenizers and not self.compute_need_bytes(frame)

    def compute_need_bytes(self, frame: Generate | CountTokens | Embed) -> int:
        """Return the transient bytes of tokenizing this prompt. If still necessary, they include a load and a trial of
        its tokenizer, and the tables for its grammar.

        Return 0 if the gate need not check the bytes, or if the model is unknown or its files cannot be used.
        """
        found = self._catalogue.find_fresh(frame.model)
        if found is None or found.cause:
            return 0
        tokenizer = self._tokenizers.get(_get_key(found))
        guided = isinstance(frame, Generate) and frame.params.grammar is not None
        files = _measure_files(Path(found.folder))
        trial = (
            self._trials.compute_need_bytes(found.fingerprint, files)
            if self._trials is not None and tokenizer is None
            else 0
        )
        return trial + estimate_tokenize_bytes(
            count_text_bytes(frame),
            files,
            loads=tokenizer is None,
            guides=guided and (tokenizer is None or not self._grammars.has_tables_for(tokenizer)),
            context=self._context(found) if isinstance(frame, Generate) else 0,
        )

    def list_features(self, descriptor: ModelDescriptor) -> tuple[str, ...]:
        """Return the features of a model that its report names (`wire.report.Model.features`).

        The files of the model determine whether it has `reasoning`. Before the first request has loaded the tokenizer,
        return all other features, because an unknown feature must not cause a refusal. The only feature of a model for
        embeddings or scores is its kind.
        """
        if descriptor.kind is not ModelKind.CHAT:
            return (descriptor.kind.value,)
        tokenizer = self._tokenizers.get(_get_key(descriptor))
        missing: set[str] = set() if descriptor.reasoning else {"reasoning"}
        if tokenizer is not None:
            missing |= {"tools"}.difference(tokenizer.features)
            missing |= set() if tokenizer.constrainable else {"grammar"}
        return tuple(feature for feature in FEATURES if feature not in missing)

    def prepare(self, request: Generate) -> PreparedRequest:
        """Tokenize a request and compile its grammar. Return the prepared request, whose `refused` is set if it is
        refused. Never raise, because an exception would end the calling thread."""
        try:
            with self._record_tokenization(request.model, request.request):
                return self._prepare(request)
        except Exception as error:
            log.exception("prepare", request=request.request, request_id=request.request_id)
            return _refuse(request, RefusalCode.TEMPLATE, f"the prompt could not be rendered: {type(error).__name__}")

    def count_tokens(self, question: CountTokens) -> Finished | Refusal:
        """Count the tokens of a prompt. Return `Finished` with the count as `prompt_tokens`, or the refusal. Never
        raise. The first call for a model may load its tokenizer (`load_tokenizer`)."""
        request = Generate(
            question.request,
            0,
            "",
            question.model,
            question.messages,
            GenerationParams(),
            question.created,
            tools=question.tools,
            template=question.template,
        )
        try:
            tokenizer = self._get_tokenizer(request)
            if isinstance(tokenizer, Refused):
                return Refusal(question.request, tokenizer)
            with self._record_tokenization(question.model, question.request):
                renamed = rename_tools(request, find_tool_names(tokenizer.call_parser, request.tools))
                return Finished(question.request, (), tokenizer.count_tokens(renamed), 0)
        except TemplateFailed as error:
            return Refusal(
                question.request, Refused(RefusalCode.TEMPLATE, f"the prompt could not be rendered: {error}")
            )
        except Exception as error:
            log.exception("count", request=question.request)
            return Refusal(
                question.request,
                Refused(RefusalCode.TEMPLATE, f"the prompt could not be rendered: {type(error).__name__}"),
            )

    def find_tokenizer(self, model: str, kind: ModelKind) -> Tokenizer | Refused:
        """Return the tokenizer of a model for requests of a kind, loaded if necessary. Return the refusal if the model
        cannot be used or has another kind.

        Raise `OSError` if the process of the tokenizer's trial cannot be started.
        """
        found = self._catalogue.find_fresh(model)
        if found is None:
            return Refused(RefusalCode.NO_MODEL, f"this node has no model {model}")
        if cause := self._barred(found):
            return Refused(RefusalCode.LOAD_FAILED, f"{found.name} cannot be loaded: {cause}")
        if found.kind is not kind:
            return Refused(RefusalCode.UNSUPPORTED, explain_other_kind(model, found.kind))
        try:
            return self.load_tokenizer(found)
        except TokenizerError as error:
            return Refused(RefusalCode.LOAD_FAILED, f"{found.name} cannot be loaded: {error}")

    def _get_tokenizer(self, request: Generate) -> Tokenizer | Refused:
        """Return the tokenizer of a request's model. Return the refusal if there is none, or if the request has tools
        and its chat template has none."""
        tokenizer = self.find_tokenizer(request.model, ModelKind.CHAT)
        if isinstance(tokenizer, Tokenizer) and request.tools and "tools" not in tokenizer.features:
            return Refused(
                RefusalCode.UNSUPPORTED, f"{request.model} does not support tools: its chat template has none"
            )
        return tokenizer

    def _prepare(self, request: Generate) -> PreparedRequest:
        tokenizer = self._get_tokenizer(request)
        if isinstance(tokenizer, Refused):
            return PreparedRequest(request, refused=tokenizer)
        found = self._catalogue.find(request.model)
        most = 0 if found is None else self._context(found)
        names = find_tool_names(tokenizer.call_parser, request.tools)
        renamed = rename_tools(request, names)
        try:
            prompt = tokenizer.tokenize_request(renamed, most)
            grammar = self._compile_grammar(renamed, tokenizer, prompt)
            shared = tokenizer.count_shared_tokens(renamed, prompt)
        except TooLong as error:
            text = f"{error}; the context of {request.model} is {most}: shorten the prompt"
            return _refuse(request, RefusalCode.CONTEXT, text)
        except TemplateFailed as error:
            return _refuse(request, RefusalCode.TEMPLATE, f"the prompt could not be rendered: {error}")
        except UnsupportedSchema as error:
            return _refuse(request, RefusalCode.INVALID, str(error))
        params = request.params

        def create_pipeline(choice: int) -> TextPipeline:
            if request.text or request.ids:
                return tokenizer.create_plain_pipeline(params.stop)
            return tokenizer.create_pipeline(
                request.request_id,
                choice,
                params.stop,
                renamed.tools,
                prompt.thinking,
                continued=prompt.continued,
                one_call=params.one_call,
                grammar=grammar,
                client_names={new: name for name, new in names.items()},
            )

        return PreparedRequest(
            request,
            tuple(prompt.ids),
            tokenizer.eos,
            create_pipeline,
            tokenizer.token_bytes,
            grammar=grammar,
            shared=shared,
        )

    def _compile_grammar(
        self, request: Generate, tokenizer: Tokenizer, prompt: TokenizedPrompt
    ) -> CompiledGrammar | None:
        """Compile the grammar of a request. Raise `UnsupportedSchema` on any error."""
        spec = request.params.grammar
        if spec is None:
            return None
        try:
            with self._compiling:
                return self._grammars.compile(tokenizer, spec, request.tools, prompt, one_call=request.params.one_call)
        except UnsupportedSchema:
            raise
        except Exception as error:
            log.exception("grammar", request=request.request, request_id=request.request_id)
            raise UnsupportedSchema(f"the grammar could not be parsed: {type(error).__name__}") from error

    def load_tokenizer(self, descriptor: ModelDescriptor) -> Tokenizer:
        """Return the tokenizer of a model, which the first call tries and loads. A load also removes the tokenizers of
        models that are no longer in the catalogue. The trial blocks the calling thread for at most about
        `tokenizer_trial.TIMEOUT_SECONDS`. A load in another thread blocks it as well.

        Raise `TokenizerError` if the trial or the load fails, and `OSError` if the process of the trial cannot be
        started.
        """
        tokenizer = self._tokenizers.get(_get_key(descriptor))
        if tokenizer is not None:
            return tokenizer
        with self._loading:
            tokenizer = self._tokenizers.get(_get_key(descriptor))  # another thread may have loaded it by now
            if tokenizer is None:
                if self._trials is not None:
                    self._trials.run(
                        Path(descriptor.folder), descriptor.fingerprint, _measure_files(Path(descriptor.folder))
                    )
                self._drop_departed()
                tokenizer = self._tokenizers[_get_key(descriptor)] = load(Path(descriptor.folder))
        return tokenizer

    def _drop_departed(self) -> None:
        """Remove the tokenizers of models that are no longer in the catalogue, with their compiled grammars.

        Requests in progress keep their tokenizers. Memory is therefore bounded by the models of the catalogue.
        """
        keys = set(map(_get_key, self._catalogue.get_models().values()))
        kept = {key: tokenizer for key, tokenizer in self._tokenizers.items() if key in keys}
        if len(kept) < len(self._tokenizers):
            self._tokenizers = kept
            with self._compiling:
                self._grammars.retain(kept.values())


def _skip_recording(model: str, request: int = 0) -> AbstractContextManager[None]:
    return nullcontext()


def _get_key(descriptor: ModelDescriptor) -> str:
    return f"{descriptor.folder}:{descriptor.fingerprint}"


def _measure_files(folder: Path) -> int:
    """Return the bytes of a tokenizer's files; 0 if none can be read, which its load will report."""
    sizes = (path.stat().st_size for name in FILES if (path := folder / name).is_file())
    return sum(sizes)


def _refuse(request: Generate, code: RefusalCode, message: str) -> PreparedRequest:
    return PreparedRequest(request, refused=Refused(code, message))
