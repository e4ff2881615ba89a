"""Steady load on a fleet without models (:mod:`tests.e2e.hollow`), every token of every answer checked."""

from __future__ import annotations

import threading
import time
from collections import Counter

import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc

TOKENS = 40  # of an answer, 0.8 s


class Stream:
    """Answers from the gRPC router, one after the other, until told to stop."""

    def __init__(self, port: int, model: str) -> None:
        self.seeds: Counter[int] = Counter()  # right answers, by what the engine adds to each token
        self.failed: list[str] = []
        self._stopping = False
        self._stub = pb_grpc.VllmEngineStub(grpc.insecure_channel(f"127.0.0.1:{port}"))
        self._model = model
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._stopping:
            number += 1
            request = pb.GenerateRequest(
                request_id=f"{id(self)}-{number}",
                tokenized=pb.TokenizedInput(input_ids=[1, 2, 3]),
                sampling_params=pb.SamplingParams(max_tokens=TOKENS, temperature=0.0),
                stream=True,
            )
            ids: list[int] = []
            try:
                for answer in self._stub.Generate(request, metadata=[("x-npufleet-model", self._model)]):
                    ids += answer.chunk.token_ids if answer.HasField("chunk") else []
            except grpc.RpcError as error:
                self.failed.append(f"{error} after {len(ids)} tokens")
                time.sleep(0.2)
                continue
            if ids == [ids[0] + n % 50 for n in range(TOKENS)]:
                self.seeds[ids[0]] += 1
            else:
                self.failed.append(f"wrong answer {ids}")

    def stop(self) -> None:
        """Let the last answer end."""
        self._stopping = True
        self._thread.join(60)
