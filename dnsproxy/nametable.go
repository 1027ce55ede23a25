package dnsproxy

import (
	"fmt"
	"iter"
	"unicode/utf8"
	"unsafe"

	"github.com/nametap/nametap/dnsproxy/wire"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/nametap/nametap/api"
)

// The fields of a NameTable on the wire; api/nds.proto explains them.
const (
	fieldTable = 1

	fieldMapKey   = 1
	fieldMapValue = 2

	fieldIPs       = 1
	fieldRegistry  = 2
	fieldShortname = 3
	fieldNamespace = 4
	fieldAltHosts  = 5
)

// wireEntries yields the entries of a NameTable in wire form, as views of it. After
// an error it yields no more.
func wireEntries(table []byte) iter.Seq2[[]byte, error] {
	return func(yield func([]byte, error) bool) {
		for len(table) > 0 {
			field, value, n := consumeField(table)
			if n < 0 {
				yield(nil, protowire.ParseError(n))
				return
			}
			table = table[n:]
			// Another field is of a later version of the message.
			if field == fieldTable && !yield(value, nil) {
				return
			}
		}
	}
}

// A wireEntry is an entry by its parts, views of it.
type wireEntry struct{ key, info []byte }

// parseWireEntry splits an entry of the map into key and value.
func parseWireEntry(b []byte) (entry wireEntry, err error) {
	for len(b) > 0 {
		field, value, n := consumeField(b)
		if n < 0 {
			return wireEntry{}, protowire.ParseError(n)
		}
		switch field {
		case fieldMapKey:
			entry.key = value
		case fieldMapValue:
			entry.info = value
		}
		b = b[n:]
	}
	return entry, nil
}

// consumeField reads one field. value is that of a field of bytes, nil of others,
// which no field of ours is; n is its length, negative for an error.
func consumeField(b []byte) (field protowire.Number, value []byte, n int) {
	field, kind, tagLen := protowire.ConsumeTag(b)
	if tagLen < 0 {
		return 0, nil, tagLen
	}
	if kind == protowire.BytesType {
		value, n = protowire.ConsumeBytes(b[tagLen:])
	} else {
		// What has the number of a field of ours and not its type is not ours.
		field, n = 0, protowire.ConsumeFieldValue(field, kind, b[tagLen:])
	}
	if n < 0 {
		return 0, nil, n
	}
	return field, value, tagLen + n
}

// A nameInfo is a NameInfo in Go's form. Its texts are views of the push.
type nameInfo struct {
	ips      []string
	altHosts []string
	hostInfo
}

// parse reads a NameInfo in wire form. It keeps the room of its lists.
func (info *nameInfo) parse(b []byte) error {
	*info = nameInfo{ips: info.ips[:0], altHosts: info.altHosts[:0]}
	for len(b) > 0 {
		field, value, n := consumeField(b)
		if n < 0 {
			return protowire.ParseError(n)
		}
		b = b[n:]
		if field < fieldIPs || field > fieldAltHosts {
			continue
		}
		if !utf8.Valid(value) {
			return fmt.Errorf("field %d of a NameInfo: %q is no UTF-8", field, value)
		}
		text := viewString(value)
		switch field {
		case fieldIPs:
			info.ips = append(info.ips, text)
		case fieldRegistry:
			info.registry = text
		case fieldShortname:
			info.shortname = text
		case fieldNamespace:
			info.namespace = text
		case fieldAltHosts:
			info.altHosts = append(info.altHosts, text)
		}
	}
	return nil
}

// viewString returns b as a string without a copy; b must not change while the
// string is in use, which for the bytes of a push is for ever.
func viewString(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }

// NameTable returns the table as a NameTable: every host under the key that the
// control plane gave it, and the short names that answer as entries of their
// own, as Istio's agent shows them. The caller owns the result.
func (t *Table) NameTable() *api.NameTable {
	out := &api.NameTable{Table: make(map[string]*api.NameTable_NameInfo, 3*t.Len())}
	var names [3]wire.Name
	for h := range t.all {
		info := h.info(&t.cluster)
		out.Table[info.key] = &api.NameTable_NameInfo{
			Ips: addressTexts(&h), Registry: info.registry, Shortname: info.shortname, Namespace: info.namespace,
		}
		if h.derived() {
			for _, name := range t.cluster.heads(h.name, names[:0]) {
				t.listShortName(out, name, &h)
			}
		}
	}
	for name, fqdn := range t.aliases {
		if h, ok := t.find(fqdn); ok {
			t.listShortName(out, name, &h)
		}
	}
	return out
}

// listShortName puts name in out if it is h that answers it.
func (t *Table) listShortName(out *api.NameTable, name wire.Name, h *host) {
	if m := t.lookup(name, nil, &suffixRules{}, new(scratch)); m.rule != RuleNone && m.host.name == h.name {
		out.Table[name.String()] = &api.NameTable_NameInfo{Ips: addressTexts(h), Registry: h.info(&t.cluster).registry}
	}
}

func addressTexts(h *host) []string {
	var texts []string
	for addr := range h.addresses() {
		texts = append(texts, addr.String())
	}
	return texts
}
