"""Writes the descriptor set by which a transcoder serves the native API as JSON over HTTP (`make protos`).

The paths stand here and not as annotations in protos/, so that whoever makes a client of these needs no other files.
"""

import sys
from pathlib import Path

from google.api import annotations_pb2, http_pb2
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FileDescriptor
from google.rpc import error_details_pb2, status_pb2

from twostroke.v1 import inference_pb2

PLACE = Path(__file__).parent.parent / "compose" / "gateways" / "envoy" / "descriptors.pb"
SERVICE = "Inference"
RULES = {
    "Generate": http_pb2.HttpRule(post="/twostroke/v1/generate", body="*"),
    "Tokenize": http_pb2.HttpRule(post="/twostroke/v1/tokenize", body="*"),
    "GetModel": http_pb2.HttpRule(get="/twostroke/v1/model"),
}
FILES = (inference_pb2.DESCRIPTOR, annotations_pb2.DESCRIPTOR, status_pb2.DESCRIPTOR, error_details_pb2.DESCRIPTOR)


def described(file: FileDescriptor) -> descriptor_pb2.FileDescriptorProto:
    """The file, with the paths of the service's methods."""
    proto = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(proto)
    for service in proto.service:
        if service.name != SERVICE:
            continue
        proto.dependency.append(annotations_pb2.DESCRIPTOR.name)
        for method in service.method:
            method.options.Extensions[annotations_pb2.http].CopyFrom(RULES[method.name])
    return proto


def descriptors() -> bytes:
    """A FileDescriptorSet of the public API, of what its errors carry, and of all that these import."""
    made = descriptor_pb2.FileDescriptorSet()
    waiting, done = list(FILES), dict[str, FileDescriptor]()

    def add(file: FileDescriptor) -> None:
        for needed in file.dependencies:
            add(needed)
        if file.name not in done:
            done[file.name] = file
            made.file.append(described(file))

    for file in (annotations_pb2.DESCRIPTOR, *waiting):
        add(file)
    return made.SerializeToString(deterministic=True)


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else PLACE).write_bytes(descriptors())
