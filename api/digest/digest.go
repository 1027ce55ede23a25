// Package digest computes the checksums of tables, which a control plane and its agents compare (NameTable.Change in
// nds.proto). The checksum of a table is the sum of its entries' checksums. So the order of the entries does not
// matter, and only a changed entry has to be hashed again.
//
// Checksums find faults. They do not prove that tables are equal, because an author can choose entries whose checksums
// have a certain sum. A computer needs half a minute to find 128 hosts for a given checksum. It needs a second to find
// 8 hosts for a given digest, which is the first half of a checksum. So where there is another way to know what to
// send, keep or use, checksums are not used. If entries are replaced by entries with the same sum while an agent is
// away, the agent keeps the previous entries.
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

// Of returns the checksum of one entry. The entry is in the form that it has in a NameTable in wire form, tag and
// length included.
func Of(entry []byte) Sum {
	s := sha256.Sum256(entry)
	return Sum{binary.BigEndian.Uint64(s[:]), binary.BigEndian.Uint64(s[8:])}
}

// ParseSum returns the checksum in b; ok is true if b has SumSize bytes.
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
