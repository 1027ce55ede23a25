// Package digest has what nametap-discovery and its agents compute alike: the shards of hosts, and checksums.
//
// Hosts are spread over shards by a hash of their names. nametap-discovery sends a table in these shards, and the agent
// keeps it in them. If the two had different hashes, agents would have the same hosts, but would build more shards after a
// change.
//
// The hash is of a name in wire form (RFC 1035, section 3.1): labels in lower case, each after its length, without the
// empty label at the end, and only the first 255 bytes. It begins as the number of these bytes. Then the bytes are read
// eight at a time, as little-endian numbers. For each number, the hash becomes (hash xor number) * 0x9e3779b97f4a7c15,
// modulo 2^64. The last number is the last eight bytes, so some bytes may be read twice. If there are fewer than eight
// bytes, zeros are appended. The shard is the nine highest bits of the hash.
package digest

import (
	"encoding/binary"
	"fmt"
	"unsafe"

	"google.golang.org/protobuf/encoding/protowire"
)

// Count is the number of shards over which hosts are spread.
const Count = 512

// maxName is how many bytes of a name, without the dot at its end, determine its shard.
const maxName = 254

// ShardOf returns the shard of a host. The host's name may be in any case and may have a dot at
// the end, because the shard is computed from the wire form of the name.
func ShardOf[T string | []byte](host T) int {
	if n := len(host); n > 0 && host[n-1] == '.' {
		host = host[:n-1]
	}
	host = host[:min(len(host), maxName)]
	var name [1 + maxName]byte
	label := 0 // offset of the length of the current label
	for i := range len(host) {
		c := host[i]
		switch {
		case c == '.':
			name[label] = byte(i - label) //nolint:gosec // truncated if host is not a name
			label = i + 1
		case 'A' <= c && c <= 'Z':
			c += 'a' - 'A'
		}
		name[1+i] = c
	}
	name[label] = byte(len(host) - label) //nolint:gosec // the same
	return shardOfWire(name[:1+len(host)])
}

// ShardOfWire returns the shard of a host by its name in wire form: lower-case labels, each after its
// length, without the empty label at the end. It reads eight bytes at a time, because the agent calls it for each query.
func ShardOfWire(name string) int {
	return shardOfWire(unsafe.Slice(unsafe.StringData(name), len(name)))
}

func shardOfWire(name []byte) int {
	const (
		odd  = 0x9e3779b97f4a7c15 // the golden ratio
		word = 8
	)
	hash := uint64(len(name))
	if len(name) < word {
		name = append(make([]byte, 0, word), name...)[:word]
	}
	for at := 0; at+word < len(name); at += word {
		hash = (hash ^ binary.LittleEndian.Uint64(name[at:])) * odd
	}
	hash = (hash ^ binary.LittleEndian.Uint64(name[len(name)-word:])) * odd
	return int(hash >> 55)
}

// Split returns the entries of a NameTable in wire form, by shard. It returns an error if the table cannot be parsed.
func Split(table []byte) (map[int][]byte, error) {
	shards, usual := make(map[int][]byte, Count), len(table)/Count*5/4 // bytes of a shard
	for rest := table; len(rest) > 0; {
		number, kind, n := protowire.ConsumeField(rest)
		if n < 0 {
			return nil, fmt.Errorf("NameTable of %d bytes: %w", len(table), protowire.ParseError(n))
		}
		if number == fieldTable && kind == protowire.BytesType {
			key, err := KeyOf(rest[:n])
			if err != nil {
				return nil, fmt.Errorf("NameTable of %d bytes: %w", len(table), err)
			}
			shard := ShardOf(key)
			if shards[shard] == nil {
				shards[shard] = make([]byte, 0, max(usual, n))
			}
			shards[shard] = append(shards[shard], rest[:n]...)
		}
		rest = rest[n:]
	}
	return shards, nil
}

// The fields of a NameTable, and of an entry of its map.
const (
	fieldTable protowire.Number = 1
	fieldKey   protowire.Number = 1
)

// KeyOf returns the key of an entry of a NameTable. entry includes its tag and length, which must be well-formed.
func KeyOf(entry []byte) (key []byte, err error) {
	_, _, tag := protowire.ConsumeTag(entry)
	body, _ := protowire.ConsumeBytes(entry[tag:])
	for len(body) > 0 {
		number, kind, tag := protowire.ConsumeTag(body)
		if tag < 0 {
			return nil, protowire.ParseError(tag)
		}
		n := protowire.ConsumeFieldValue(number, kind, body[tag:])
		if n < 0 {
			return nil, protowire.ParseError(n)
		}
		if number == fieldKey && kind == protowire.BytesType {
			key, _ = protowire.ConsumeBytes(body[tag:])
		}
		body = body[tag+n:]
	}
	return key, nil
}
