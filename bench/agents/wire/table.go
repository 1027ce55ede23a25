package wire

import (
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
)

// fieldTable is the field number of the entries of a NameTable.
const fieldTable = 1

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
