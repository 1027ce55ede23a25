package digest

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"iter"
	"slices"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
)

// NamedTables is the client feature (Node.client_features) of clients that take a table as resources with names, which
// are the numbers of its shards.
const NamedTables = "nametap.named-tables"

// VersionPrefix begins the versions of nametap-discovery's resources. The first 8 bytes of the SHA-256 of the resource's
// NameTable follow, in base64 without padding. An agent checks versions that begin so. The prefix is short, because an
// agent that connects announces 512 versions.
const VersionPrefix = "nt:"

// HashOf returns the first 8 bytes, big endian, of the SHA-256 of a NameTable in wire form.
func HashOf(nameTable []byte) uint64 {
	sum := sha256.Sum256(nameTable)
	return binary.BigEndian.Uint64(sum[:])
}

// VersionOf returns the version of a resource whose NameTable has a hash.
func VersionOf(hash uint64) string {
	return VersionPrefix + base64.RawStdEncoding.EncodeToString(binary.BigEndian.AppendUint64(nil, hash))
}

// OfTable returns a checksum of a table by the names and versions of its resources: the first 16 bytes, in hexadecimal,
// of the SHA-256 of a line "NAME VERSION" for each, sorted. nametap-discovery and its agents show it.
func OfTable(versions iter.Seq2[string, string]) string {
	var lines []string
	for name, version := range versions {
		lines = append(lines, name+" "+version+"\n")
	}
	slices.Sort(lines)
	sum := sha256.Sum256([]byte(strings.Join(lines, "")))
	return hex.EncodeToString(sum[:16])
}

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
