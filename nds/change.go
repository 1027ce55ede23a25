package nds

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/api/digest"
)

// The fields of a NameTable.
const (
	fieldTable  protowire.Number = 1
	fieldChange protowire.Number = 1001
)

// A change is a parsed NameTable with a Change (api/nds.proto), or several such NameTables, joined by [change.join].
// Its byte slices share the memory of the NameTables.
type change struct {
	// hosts has the new entry of each host that was added or changed, and nil for each host that was removed. The
	// keys are in lower case. An entry is in wire form, tag and length included.
	hosts map[string][]byte
	// complete has the shards that the change replaces. After the change, these shards have only the entries in
	// hosts.
	complete digest.Set
	sum      digest.Sum // the checksum of the table after the change
	revision []byte
}

// parseChange parses a NameTable that has a Change.
func parseChange(table []byte) (change, error) {
	c := change{hosts: map[string][]byte{}}
	var message api.NameTable_Change
	for rest := table; len(rest) > 0; {
		number, kind, n := protowire.ConsumeField(rest)
		if n < 0 {
			return change{}, fmt.Errorf("a change of %d bytes: %w", len(table), protowire.ParseError(n))
		}
		field := rest[:n]
		rest = rest[n:]
		if kind != protowire.BytesType {
			continue
		}
		var err error
		switch number {
		case fieldTable:
			err = c.add(field)
		case fieldChange:
			_, _, tag := protowire.ConsumeTag(field)
			value, _ := protowire.ConsumeBytes(field[tag:])
			err = proto.UnmarshalOptions{Merge: true}.Unmarshal(value, &message)
		}
		if err != nil {
			return change{}, fmt.Errorf("a change of %d bytes: %w", len(table), err)
		}
	}
	return c, c.setMessage(&message)
}

// add adds an entry, which is in wire form.
func (c *change) add(raw []byte) error {
	key, _, err := cutEntry(raw)
	if err != nil {
		return err
	}
	host := string(appendLower(nil, key))
	if _, twice := c.hosts[host]; twice {
		return fmt.Errorf("host %q twice", host)
	}
	c.hosts[host] = raw
	return nil
}

// setMessage sets the fields of c from the Change.
func (c *change) setMessage(m *api.NameTable_Change) (err error) {
	var ok bool
	if c.sum, ok = digest.ParseSum(m.GetSum()); !ok {
		return fmt.Errorf("a change with a checksum of %d bytes: want %d", len(m.GetSum()), digest.SumSize)
	}
	if c.complete, ok = digest.ParseSet(m.GetComplete()); !ok {
		return fmt.Errorf("a change with %d bytes of complete shards: want %d or none", len(m.GetComplete()), digest.SetSize)
	}
	for _, host := range m.GetRemoved() {
		host = string(appendLower(nil, []byte(host)))
		if _, present := c.hosts[host]; !present {
			c.hosts[host] = nil
		}
	}
	c.revision = m.GetRevision()
	return nil
}

// join adds the change next to c. Applying c then has the same result as applying the previous c and then next.
func (c *change) join(next change) {
	c.complete.Join(next.complete)
	if next.complete != (digest.Set{}) {
		for host := range c.hosts {
			if next.complete.Has(digest.ShardOf(host)) {
				delete(c.hosts, host)
			}
		}
	}
	maps.Copy(c.hosts, next.hosts)
	c.sum, c.revision = next.sum, next.revision
}

// difference returns the error for a change whose checksum does not match the resulting table.
func (c *change) difference() error {
	hosts := slices.Sorted(maps.Keys(c.hosts))
	return &differenceError{fmt.Sprintf("the change's checksum %s does not match the resulting table: it changes %s", c.sum, someOf("host", hosts))}
}

// A differenceError is the error if a table does not have the checksum that the control plane has sent.
type differenceError struct{ text string }

func (e *differenceError) Error() string { return e.text }

// isDifference reports whether err is a differenceError.
func isDifference(err error) bool {
	var difference *differenceError
	return errors.As(err, &difference)
}

// someOf returns a text that lists names. If there are more than five, it lists the first five and the number of
// further names. noun is the word for a name, such as "host".
func someOf(noun string, names []string) string {
	const maxListed = 5
	switch {
	case len(names) == 0:
		return "an unknown " + noun
	case len(names) > maxListed:
		return fmt.Sprintf("%ss %s and %d more", noun, strings.Join(names[:maxListed], ", "), len(names)-maxListed)
	case len(names) > 1:
		return noun + "s " + strings.Join(names, ", ")
	}
	return noun + " " + names[0]
}

// hasChange reports whether a NameTable has a Change.
func hasChange(table []byte) (bool, error) {
	for len(table) > 0 {
		number, kind, n := protowire.ConsumeTag(table)
		if n < 0 {
			return false, protowire.ParseError(n)
		}
		if number == fieldChange && kind == protowire.BytesType {
			return true, nil
		}
		value := protowire.ConsumeFieldValue(number, kind, table[n:])
		if value < 0 {
			return false, protowire.ParseError(value)
		}
		table = table[n+value:]
	}
	return false, nil
}

// marshalChange returns m as a field in wire form. Appending this field to a NameTable makes the NameTable a change.
func marshalChange(m *api.NameTable_Change) ([]byte, error) {
	value, err := proto.Marshal(m)
	if err != nil {
		return nil, err
	}
	return protowire.AppendBytes(protowire.AppendTag(nil, fieldChange, protowire.BytesType), value), nil
}

// cutEntry returns the key and the length of the entry at the start of b. The entry begins with its tag, and the
// length includes the tag.
func cutEntry(b []byte) (key []byte, length int, err error) {
	number, kind, length := protowire.ConsumeField(b)
	switch {
	case length < 0:
		return nil, 0, protowire.ParseError(length)
	case number != fieldTable || kind != protowire.BytesType:
		return nil, 0, errors.New("want an entry of the table")
	}
	key, err = digest.KeyOf(b[:length])
	return key, length, err
}

// appendLower appends key to dst, with ASCII letters in lower case.
func appendLower(dst, key []byte) []byte {
	for _, c := range key {
		if 'A' <= c && c <= 'Z' {
			c += 'a' - 'A'
		}
		dst = append(dst, c)
	}
	return dst
}
