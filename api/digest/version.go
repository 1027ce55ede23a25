package digest

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"iter"
	"slices"
	"strings"
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
