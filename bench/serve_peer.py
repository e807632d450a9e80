"""sentence-transformers behind plain FastAPI, as most tutorials have it: one of the contenders of serve.py.

python bench/serve_peer.py MODEL PORT
"""

from __future__ import annotations

import sys

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from sentence_transformers import SentenceTransformer


class Body(BaseModel):
    input: str | list[str]
    model: str = ""


def make_app(model: SentenceTransformer) -> FastAPI:
    app = FastAPI()

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ready"}

    @app.post("/v1/embeddings")
    def embeddings(body: Body) -> dict[str, object]:  # no async: FastAPI runs it in one of its threads
        texts = [body.input] if isinstance(body.input, str) else body.input
        vectors = model.encode(texts, show_progress_bar=False, normalize_embeddings=True)
        rows = [{"object": "embedding", "index": n, "embedding": row.tolist()} for n, row in enumerate(vectors)]
        return {"object": "list", "data": rows, "model": body.model}

    return app


if __name__ == "__main__":
    uvicorn.run(make_app(SentenceTransformer(sys.argv[1], device="cpu")), port=int(sys.argv[2]), log_level="warning")
