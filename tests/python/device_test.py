"""Device memory: what the client sends of it to a server with scripted answers, and how `kvtier serve`
on the CPU answers."""

from __future__ import annotations

import tempfile
import unittest
from concurrent import futures
from typing import Any, Iterator

import grpc
import kvtier
import numpy as np
from kvtier.data_plane import Attached
from kvtier.v1 import (
    attention_pb2,
    attention_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
    shared_memory_pb2,
    shared_memory_pb2_grpc,
    tensor_pb2,
)
from server import ServerTest

MODEL = kvtier.ModelConfig(layers=1, query_heads=2, kv_heads=1, head_dim=64)
BASE = 0x7000_0000_0000
ROOM = 2 << 20
HANDLE, UUID = bytes(range(64)), bytes(range(16))


class FakeServer(
    session_pb2_grpc.SessionServiceServicer,
    attention_pb2_grpc.AttentionServiceServicer,
    shared_memory_pb2_grpc.SharedMemoryServiceServicer,
):
    """Keeps the requests that came, and answers as if it had done what they ask."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    def CreateSession(self, request: Any, context: Any) -> Any:
        session = session_pb2.Session(name="sessions/x", layer_lengths=[0])
        session.lease_ttl.seconds = 60
        return session_pb2.CreateSessionResponse(session=session)

    def ReleaseSession(self, request: Any, context: Any) -> Any:
        return session_pb2.ReleaseSessionResponse()

    def Append(self, requests: Iterator[Any], context: Any) -> Any:
        self.requests.extend(requests)
        return attention_pb2.AppendResponse(layer_lengths=[9000])

    def Attend(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        lse = tensor_pb2.Tensor(
            dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[1, 2], data=np.float32([1, 2]).tobytes()
        )
        out = tensor_pb2.Tensor(memory=request.out_memory)
        return attention_pb2.AttendResponse(out=out, lse=lse)

    def ShareDeviceMemory(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        return shared_memory_pb2.ShareDeviceMemoryResponse(region="regions/r")

    def DeleteAttachment(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        return shared_memory_pb2.DeleteAttachmentResponse()


class OpenChannel:
    """In place of one to a data plane that is not there."""

    closed = False

    def close(self) -> None:
        self.closed = True


class TorchTensor:
    """What the client asks of one."""

    def __init__(
        self, pointer: int, shape: tuple[int, ...], dtype: str, dense: bool = True, negative: bool = False
    ) -> None:
        self._pointer = pointer
        self._dense = dense
        self._negative = negative
        self.shape = shape
        self.dtype = f"torch.{dtype}"
        self.is_cuda = True

    def data_ptr(self) -> int:
        return self._pointer

    def is_contiguous(self) -> bool:
        return self._dense

    def is_neg(self) -> bool:
        return self._negative


class CupyArray:
    def __init__(self, **interface: Any) -> None:
        self.__cuda_array_interface__ = interface


class DeviceTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="kvtier-python-")
        self.addCleanup(folder.cleanup)
        self.fake = FakeServer()
        server = grpc.server(futures.ThreadPoolExecutor(4))
        session_pb2_grpc.add_SessionServiceServicer_to_server(self.fake, server)  # type: ignore[no-untyped-call]
        attention_pb2_grpc.add_AttentionServiceServicer_to_server(self.fake, server)  # type: ignore[no-untyped-call]
        shared_memory_pb2_grpc.add_SharedMemoryServiceServicer_to_server(self.fake, server)  # type: ignore[no-untyped-call]
        server.add_insecure_port(f"unix:{folder.name}/s")
        server.start()
        self.addCleanup(lambda: server.stop(None).wait())
        self.client = kvtier.Client(f"unix:{folder.name}/s", data_plane=False)
        self.addCleanup(self.client.close)
        self.channel = OpenChannel()
        attached: Any = Attached(self.channel, "attachments/a")  # type: ignore[arg-type]
        self.client.planes.attach = lambda staging_bytes: attached  # type: ignore[method-assign]
        self.memory = self.client.share_device_memory(HANDLE, UUID, BASE, ROOM)

    def test_memory_is_shared_until_it_is_closed(self) -> None:
        (request,) = self.fake.requests
        self.assertEqual(request.attachment, "attachments/a")
        self.assertEqual((request.cuda_ipc_handle, request.device_uuid), (HANDLE, UUID))
        self.assertEqual(request.bytes, ROOM)
        self.assertFalse(self.channel.closed)
        self.memory.close()
        self.memory.close()  # once
        self.assertEqual([each.name for each in self.fake.requests[1:]], ["attachments/a"])
        self.assertTrue(self.channel.closed)

    def test_tensors_are_named_by_their_places(self) -> None:
        session = self.client.open(MODEL)
        self.addCleanup(session.close)
        query = self.memory.tensor(TorchTensor(BASE + 256, (1, 2, 64), "bfloat16"))
        out = self.memory.tensor(offset=1024, shape=(1, 2, 64), dtype="bfloat16")
        result = session.attend(0, query, outputs=kvtier.Outputs(out=out))
        request = self.fake.requests[-1]
        self.assertEqual(request.query.data, b"")
        self.assertEqual(request.query.dtype, tensor_pb2.DATA_TYPE_BFLOAT16)
        self.assertEqual(list(request.query.shape), [1, 2, 64])
        self.assertEqual(
            [(place.region, place.offset) for place in (request.query.memory, request.out_memory)],
            [("regions/r", 256), ("regions/r", 1024)],
        )
        self.assertFalse(request.HasField("lse_memory"))
        self.assertEqual(result.out.size, 0)
        np.testing.assert_array_equal(result.lse, np.float32([[1, 2]]))

    def test_appends_go_in_chunks_of_tokens(self) -> None:
        session = self.client.open(MODEL)
        self.addCleanup(session.close)
        rows = CupyArray(data=(BASE, False), shape=(8200, 1, 64), typestr="<f2", strides=None)
        session.append(0, self.memory.tensor(rows), np.zeros((8200, 1, 64), np.float16))
        sent = [(list(each.key.shape)[0], each.key.memory.offset) for each in self.fake.requests[1:]]
        self.assertEqual(sent, [(8192, 0), (8, 8192 * 128)])  # 1 MiB of values each
        values = [len(each.value.data) for each in self.fake.requests[1:]]
        self.assertEqual(values, [8192 * 128, 8 * 128])
        self.fake.requests.clear()
        session.append(0, *(self.memory.tensor(rows) for _ in range(2)))
        self.assertEqual([each.key.memory.offset for each in self.fake.requests], [0, 8192 * 128])

    def test_what_is_no_place_of_it_is_refused(self) -> None:
        shape = (1, 2, 64)
        for wrong in (
            TorchTensor(BASE - 16, shape, "float16"),
            TorchTensor(BASE + ROOM, shape, "float16"),
            TorchTensor(BASE + ROOM - 16, shape, "float16"),
            TorchTensor(BASE + 8, shape, "float16"),
            TorchTensor(BASE, shape, "float64"),
            TorchTensor(BASE, shape, "float16", dense=False),
            TorchTensor(BASE, shape, "float16", negative=True),
            CupyArray(data=(BASE, False), shape=shape, typestr="<f4", strides=(512, 256, 8)),
            CupyArray(data=(BASE, False), shape=(), typestr="<f4"),
            np.zeros(shape, np.float32),
        ):
            with self.assertRaises(kvtier.InvalidArgumentError):
                self.memory.tensor(wrong)
        session = self.client.open(MODEL)
        self.addCleanup(session.close)
        query = self.memory.tensor(offset=0, shape=shape, dtype="float16")
        before = len(self.fake.requests)
        for out in (
            self.memory.tensor(offset=0, shape=(2, 2, 64), dtype="float16"),
            self.memory.tensor(offset=0, shape=shape, dtype="float32"),
        ):
            with self.assertRaises(kvtier.InvalidArgumentError):
                session.attend(0, query, outputs=kvtier.Outputs(out=out))
        self.assertEqual(len(self.fake.requests), before)


class RefusalTest(ServerTest):
    def test_a_server_without_a_gpu_says_so(self) -> None:
        with kvtier.Client(self.server.address) as client:
            for handle, uuid, nbytes in ((HANDLE[1:], UUID, 16), (HANDLE, b"", 16), (HANDLE, UUID, 0)):
                with self.assertRaises(kvtier.InvalidArgumentError):
                    client.share_device_memory(handle, uuid, BASE, nbytes)
            with self.assertRaises(kvtier.FailedPreconditionError) as refused:
                client.share_device_memory(HANDLE, UUID, BASE, ROOM)
            self.assertEqual(refused.exception.reason, "NO_DEVICE")
            stub = client.connection.shared_memory
            left = stub.ListAttachments(shared_memory_pb2.ListAttachmentsRequest())
            self.assertEqual(list(left.attachments), [])
        with kvtier.Client(self.server.address, data_plane=False) as client:
            with self.assertRaises(kvtier.UnimplementedError):
                client.share_device_memory(HANDLE, UUID, BASE, ROOM)


if __name__ == "__main__":
    unittest.main()
