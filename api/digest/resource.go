package digest

import "google.golang.org/protobuf/encoding/protowire"

// TypeURL is the type of the resources that are NameTables.
const TypeURL = "type.googleapis.com/istio.networking.nds.v1.NameTable"

// ResourceHead returns what comes before a NameTable of n bytes in a DeltaDiscoveryResponse: the start of its Resource.
func ResourceHead(name, version string, n int) []byte {
	var own []byte
	for _, field := range []struct {
		number protowire.Number
		text   string
	}{{1, version}, {3, name}} {
		if field.text != "" {
			own = protowire.AppendString(protowire.AppendTag(own, field.number, protowire.BytesType), field.text)
		}
	}
	return enclose(append(own, AnyHead(n)...), n)
}

// AnyHead returns what comes before a NameTable of n bytes in a DiscoveryResponse: the start of its Any.
func AnyHead(n int) []byte {
	typeURL := protowire.AppendString(protowire.AppendTag(nil, 1, protowire.BytesType), TypeURL)
	return enclose(append(typeURL, enclose(nil, n)...), n)
}

// enclose returns the start of field 2 with the given head, and n bytes after it. This field has the resources of either
// response, the Any of a Resource, and the value of an Any.
func enclose(head []byte, n int) []byte {
	return append(protowire.AppendVarint(protowire.AppendTag(nil, 2, protowire.BytesType), uint64(len(head)+n)), head...) //nolint:gosec // not negative
}
