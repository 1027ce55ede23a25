package wire

import (
	"strings"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/nametap/nametap/api/digest"
)

// Field numbers of a NameTable.
const (
	fieldTable  = 1
	fieldChange = 1001
)

// A Change is what a NameTable says of the table that it changes. Its slices are parts of the NameTable.
type Change struct {
	Complete digest.Set // shards all of whose hosts are in the NameTable
	Removed  []string
	Sum      digest.Sum // of the whole table after the change
	Revision []byte
}

// ParseChange returns the change of a NameTable. ok is false for a whole table, which has none.
func ParseChange(table []byte) (c Change, ok bool, err error) {
	const complete, removed, sum, revision = 1, 2, 3, 4
	err = eachField(table, func(number protowire.Number, value []byte) error {
		if number != fieldChange {
			return nil
		}
		ok = true
		return eachField(value, func(number protowire.Number, value []byte) error {
			valid := true
			switch number {
			case complete:
				c.Complete, valid = digest.ParseSet(value)
			case removed:
				c.Removed = append(c.Removed, string(value))
			case sum:
				c.Sum, valid = digest.ParseSum(value)
			case revision:
				c.Revision = value
			}
			if !valid {
				return errMalformed
			}
			return nil
		})
	})
	return c, ok, err
}

// Entries calls the function use for each entry of a NameTable, with the host of the entry in lower case, and with its
// bytes, including the tag and the length.
func Entries(table []byte, use func(host string, raw []byte)) error {
	const key = 1
	for len(table) > 0 {
		number, _, n := protowire.ConsumeField(table)
		if n < 0 {
			return errMalformed
		}
		raw := table[:n]
		table = table[n:]
		if number != fieldTable {
			continue
		}
		_, _, tag := protowire.ConsumeTag(raw)
		entry, m := protowire.ConsumeBytes(raw[tag:])
		if m < 0 {
			return errMalformed
		}
		host := ""
		err := eachField(entry, func(number protowire.Number, value []byte) error {
			if number == key {
				host = strings.ToLower(string(value))
			}
			return nil
		})
		if err != nil {
			return err
		}
		use(host, raw)
	}
	return nil
}
