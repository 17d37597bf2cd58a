from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Range(_message.Message):
    __slots__ = ("start", "stop")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class Want(_message.Message):
    __slots__ = ("path", "box")
    PATH_FIELD_NUMBER: _ClassVar[int]
    BOX_FIELD_NUMBER: _ClassVar[int]
    path: str
    box: _containers.RepeatedCompositeFieldContainer[Range]
    def __init__(self, path: _Optional[str] = ..., box: _Optional[_Iterable[_Union[Range, _Mapping]]] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("generation", "step", "wants", "of_generation")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WANTS_FIELD_NUMBER: _ClassVar[int]
    OF_GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    wants: _containers.RepeatedCompositeFieldContainer[Want]
    of_generation: int
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ..., wants: _Optional[_Iterable[_Union[Want, _Mapping]]] = ..., of_generation: _Optional[int] = ...) -> None: ...

class ReadChunk(_message.Message):
    __slots__ = ("want_index", "data", "is_last", "checksum")
    WANT_INDEX_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    want_index: int
    data: bytes
    is_last: bool
    checksum: int
    def __init__(self, want_index: _Optional[int] = ..., data: _Optional[bytes] = ..., is_last: _Optional[bool] = ..., checksum: _Optional[int] = ...) -> None: ...
