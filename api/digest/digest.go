// Package digest computes the checksums of tables, which a control plane and its agents compare
// (NameTable.Change in nds.proto). The checksum of a table is the sum of its entries' checksums, so
// it does not depend on their order, and a change of one entry costs only that entry.
//
// Checksums find faults. They do not prove that tables are equal, since entries can be chosen so that their sum is any
// value: with 128 hosts that takes half a minute, and with 8 hosts a second for a digest. So they do not decide what is
// sent, kept or used where that is known in another way. An agent that was away while entries changed in this way keeps
// the previous ones.
package digest

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math/bits"
)

// SumSize is the length of an encoded checksum, in bytes.
const SumSize = 16

// A Sum is the checksum of a set of entries. The zero value is the checksum of the empty set.
type Sum struct{ high, low uint64 }

// Of returns the checksum of one entry, as it is encoded in a NameTable, tag and length included.
func Of(entry []byte) Sum {
	s := sha256.Sum256(entry)
	return Sum{binary.BigEndian.Uint64(s[:]), binary.BigEndian.Uint64(s[8:])}
}

// ParseSum returns the checksum in b; ok is false if b has not SumSize bytes.
func ParseSum(b []byte) (s Sum, ok bool) {
	if len(b) != SumSize {
		return Sum{}, false
	}
	return Sum{binary.BigEndian.Uint64(b), binary.BigEndian.Uint64(b[8:])}, true
}

// Add returns the checksum after other entries are added.
func (s Sum) Add(other Sum) Sum {
	low, carry := bits.Add64(s.low, other.low, 0)
	high, _ := bits.Add64(s.high, other.high, carry)
	return Sum{high, low}
}

// Sub returns the checksum after other entries are removed.
func (s Sum) Sub(other Sum) Sum {
	low, borrow := bits.Sub64(s.low, other.low, 0)
	high, _ := bits.Sub64(s.high, other.high, borrow)
	return Sum{high, low}
}

// Prefix returns the first 8 bytes of the checksum, which are the digest of a shard.
func (s Sum) Prefix() uint64 { return s.high }

// Bytes returns the SumSize bytes of the checksum, big endian.
func (s Sum) Bytes() []byte {
	return binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(nil, s.high), s.low)
}

// String returns 32 hexadecimal digits.
func (s Sum) String() string { return fmt.Sprintf("%016x%016x", s.high, s.low) }
