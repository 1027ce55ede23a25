package table

import (
	"encoding/binary"
	"unsafe"
)

// cutField returns the field at the start of b and what follows it.
func cutField(b []byte) (field, rest []byte) {
	n, used := binary.Uvarint(b)
	end := used + int(n) //nolint:gosec // written by appendField
	return b[used:end], b[end:]
}

// appendField appends a field of a record to dst.
func appendField[T string | []byte](dst []byte, field T) []byte {
	return append(binary.AppendUvarint(dst, uint64(len(field))), field...)
}

// viewString returns b as a string without a copy. b must not change while the string is
// in use.
func viewString(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }
