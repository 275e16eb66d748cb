"""The messages of OTLP traces as protobuf knows them: names, types and numbers of opentelemetry-proto 1.x.

Written down here because Ray takes an installed opentelemetry-proto for the whole of OpenTelemetry, and its nodes die.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

__all__ = ["TracesData"]

# Message -> fields in order: name, number, type; `*` before a type: repeated; `|`: one of `value`.
_MESSAGES = {
    "TracesData": "resource_spans 1 *ResourceSpans",
    "ResourceSpans": "resource 1 Resource, scope_spans 2 *ScopeSpans, schema_url 3 string",
    "Resource": "attributes 1 *KeyValue, dropped_attributes_count 2 uint32",
    "ScopeSpans": "scope 1 InstrumentationScope, spans 2 *Span, schema_url 3 string",
    "InstrumentationScope": (
        "name 1 string, version 2 string, attributes 3 *KeyValue, dropped_attributes_count 4 uint32"
    ),
    "Span": (
        "trace_id 1 bytes, span_id 2 bytes, trace_state 3 string, parent_span_id 4 bytes, name 5 string, "
        "kind 6 SpanKind, start_time_unix_nano 7 fixed64, end_time_unix_nano 8 fixed64, attributes 9 *KeyValue, "
        "dropped_attributes_count 10 uint32, events 11 *Event, dropped_events_count 12 uint32, links 13 *Link, "
        "dropped_links_count 14 uint32, status 15 Status, flags 16 fixed32"
    ),
    "Event": "time_unix_nano 1 fixed64, name 2 string, attributes 3 *KeyValue, dropped_attributes_count 4 uint32",
    "Link": "trace_id 1 bytes, span_id 2 bytes, trace_state 3 string, attributes 4 *KeyValue",
    "Status": "message 2 string, code 3 StatusCode",
    "KeyValue": "key 1 string, value 2 AnyValue",
    "AnyValue": (
        "string_value 1 |string, bool_value 2 |bool, int_value 3 |int64, double_value 4 |double, "
        "array_value 5 |ArrayValue, kvlist_value 6 |KeyValueList, bytes_value 7 |bytes"
    ),
    "ArrayValue": "values 1 *AnyValue",
    "KeyValueList": "values 1 *KeyValue",
}
_ENUMS = {
    "SpanKind": [f"SPAN_KIND_{n}" for n in ("UNSPECIFIED", "INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER")],
    "StatusCode": [f"STATUS_CODE_{n}" for n in ("UNSET", "OK", "ERROR")],
}


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="otlp.proto", package="otlp", syntax="proto3")
    for name, values in _ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    for name, text in _MESSAGES.items():
        message = file.message_type.add(name=name)
        if "|" in text:
            message.oneof_decl.add(name="value")
        for field in text.split(", "):
            _add(message, *field.split())
    return file


def _add(message: Any, name: str, number: str, kind: str) -> None:
    types = descriptor_pb2.FieldDescriptorProto
    plain = kind.lstrip("*|")
    field = message.field.add(name=name, number=int(number))
    field.label = types.LABEL_REPEATED if kind[0] == "*" else types.LABEL_OPTIONAL
    if kind[0] == "|":
        field.oneof_index = 0
    if plain in _MESSAGES or plain in _ENUMS:
        field.type = types.TYPE_ENUM if plain in _ENUMS else types.TYPE_MESSAGE
        field.type_name = f".otlp.{plain}"
    else:
        field.type = types.Type.Value(f"TYPE_{plain.upper()}")


_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(_file())
TracesData: Any = message_factory.GetMessageClass(_POOL.FindMessageTypeByName("otlp.TracesData"))
