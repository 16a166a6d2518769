"""Fields of pooling requests and their types; admission checks their values."""

from __future__ import annotations

from pydantic import Field

from llmstack_server.web.fields import PoolingFields


class InputFields(PoolingFields):
    """Fields of requests with inputs, or with one conversation in their place."""

    input: object = Field(None, description="a string, strings, token ids, or lists of token ids; at most 2048 of them")
    messages: list[dict[str, object]] | None = Field(None, description="a conversation, in place of the input")
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None


class EmbeddingRequest(InputFields):
    """Body of `POST /v1/embeddings`."""

    encoding_format: str | None = Field(None, description="float, or base64 of little-endian float32")
    dimensions: int | None = Field(None, description="leading numbers to keep")
    normalize: bool | None = Field(None, description="whether vectors have length 1")
    use_activation: bool | None = Field(None, description="false gives bare logits, or vectors as they are")


class PoolingRequest(EmbeddingRequest):
    """Body of `POST /pooling`."""

    task: str | None = Field(
        None, description="embed, classify, score, token_embed or token_classify; null is the model's own task"
    )


class ClassificationRequest(InputFields):
    """Body of `POST /classify`."""

    use_activation: bool | None = Field(None, description="false gives bare logits")


class PairFields(PoolingFields):
    """Fields of requests with queries and documents."""

    use_activation: bool | None = None
    max_tokens_per_doc: int | None = Field(None, description="cut longer documents to it; 0 cuts none")
    max_tokens_per_query: int | None = Field(None, description="cut longer queries to it; 0 cuts none")


class ScoreRequest(PairFields):
    """Body of `POST /score`: two lists, under one of three pairs of names."""

    text_1: object = Field(None, description="a text, or texts; each a string, or an object with a text or a content")
    text_2: object = Field(None, description="a text, or texts; as many as text_1, unless that is one")
    data_1: object = None
    data_2: object = None
    queries: object = None
    documents: object = None
    items: object = None


class CohereEmbedRequest(PoolingFields):
    """Body of `POST /v2/embed`, in the form of Cohere."""

    texts: object = Field(None, description="at most 2048 texts")
    input_type: str | None = Field(None, description="search_query, search_document, classification or clustering")
    embedding_types: list[str] | None = Field(None, description="float, base64, or both")
    output_dimension: int | None = Field(None, description="leading numbers to keep")
    truncate: str | None = Field(None, description="END (the default), START or NONE")


class RerankRequest(PairFields):
    """Body of `POST /rerank`, in the form of Jina and Cohere."""

    query: object = Field(None, description="a text, or an object with a text or a content")
    documents: object = Field(None, description="texts, or objects with a text or a content; at most 2048 of them")
    top_n: int | None = Field(None, description="how many of the best to return; null and 0 mean all")
    return_documents: bool | None = Field(None, description="whether results carry their texts")
