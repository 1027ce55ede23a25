package digest

import "encoding/binary"

// Count is the number of buckets over which hosts are spread.
const Count = 256

// BucketOf returns the bucket of a host, whose name is in lower case: its FNV-1a hash of 32 bits, the four
// bytes combined by exclusive or.
func BucketOf[T string | []byte](host T) int {
	const offset, prime = 2166136261, 16777619
	sum := uint32(offset)
	for i := range len(host) {
		sum = (sum ^ uint32(host[i])) * prime
	}
	return int(byte(sum) ^ byte(sum>>8) ^ byte(sum>>16) ^ byte(sum>>24))
}

// Buckets has the checksum of the entries of each bucket.
type Buckets [Count]Sum

// Digests has the first 8 bytes of the checksum of each bucket, which an agent sends when it connects.
type Digests [Count]uint64

// DigestsSize is the length of encoded digests, in bytes.
const DigestsSize = 8 * Count

// Digests returns the digests of the buckets.
func (b *Buckets) Digests() (d Digests) {
	for i, s := range b {
		d[i] = s.Prefix()
	}
	return d
}

// ParseDigests returns the digests in b; ok is false if b has not DigestsSize bytes.
func ParseDigests(b []byte) (d Digests, ok bool) {
	if len(b) != DigestsSize {
		return Digests{}, false
	}
	for i := range d {
		d[i] = binary.BigEndian.Uint64(b[8*i:])
	}
	return d, true
}

// Bytes returns the DigestsSize bytes of the digests, big endian.
func (d Digests) Bytes() []byte {
	out := make([]byte, 0, DigestsSize)
	for _, word := range d {
		out = binary.BigEndian.AppendUint64(out, word)
	}
	return out
}

// Differing returns the buckets whose digests differ.
func (d *Digests) Differing(other *Digests) (s Set) {
	for i := range d {
		if d[i] != other[i] {
			s.Add(i)
		}
	}
	return s
}

// Differing returns the buckets whose checksums differ.
func (b *Buckets) Differing(other *Buckets) (s Set) {
	for i := range b {
		if b[i] != other[i] {
			s.Add(i)
		}
	}
	return s
}

// Sum returns the checksum of all buckets.
func (b *Buckets) Sum() (all Sum) {
	for _, s := range b {
		all = all.Add(s)
	}
	return all
}

// SetSize is the length of an encoded set, in bytes.
const SetSize = Count / 8

// A Set is a set of buckets, a bit each: the lowest bit of the first byte is that of bucket 0.
type Set [SetSize]byte

// All returns the set of all buckets.
func All() (s Set) {
	for i := range s {
		s[i] = 0xff
	}
	return s
}

// ParseSet returns the set in b, which is empty if b is; ok is false for other lengths than SetSize.
func ParseSet(b []byte) (s Set, ok bool) {
	copy(s[:], b)
	return s, len(b) == 0 || len(b) == SetSize
}

// Add adds a bucket.
func (s *Set) Add(bucket int) { s[bucket/8] |= 1 << (bucket % 8) }

// Has reports whether a bucket is in the set.
func (s *Set) Has(bucket int) bool { return s[bucket/8]&(1<<(bucket%8)) != 0 }

// Join adds all buckets of another set.
func (s *Set) Join(other Set) {
	for i := range s {
		s[i] |= other[i]
	}
}
