package digest

import (
	"crypto/sha256"
	"encoding/hex"
	"iter"
	"slices"
	"strings"
)

// VersionPrefix begins the versions of nametap-discovery's resources. The first 8 bytes of the SHA-256 of the resource's
// NameTable follow, in base64 without padding. An agent checks versions that begin so.
const VersionPrefix = "sha256:"

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
