package push

import (
	"slices"
	"strconv"
	"sync"
	"weak"

	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/discovery/hosts"
)

// A shard is the hosts of a table that are in one shard; nil stands for none. It does not change, except that its bytes
// are dropped when no stream sends them, and made again when one needs them.
type shard struct {
	version string // as text; "" if it is not one of those that this server has
	hosts   int
	bytes   weak.Pointer[encoded] // guarded by tables.encoding
}

// A maker makes shards of hosts. Viewers that see the same in a shard one after the other share it: an object may be
// exported to a list of a thousand namespaces.
type maker struct {
	hosts *hosts.Shards
	last  map[int]made // by the number of the shard
}

// made is a shard, and what it was made of.
type made struct {
	entries []*hosts.Entry
	shard   *shard
}

func newMaker(all *hosts.Shards) *maker { return &maker{all, map[int]made{}} }

// shard returns the shard with a number of the hosts that a viewer sees; nil if it sees none.
func (m *maker) shard(v *hosts.Viewer, number int) *shard {
	entries := entriesOf(v, m.hosts[number])
	if len(entries) == 0 {
		return nil
	}
	if last := m.last[number]; slices.Equal(entries, last.entries) {
		return last.shard
	}
	content := contentOf(entries)
	s := &shard{version: digest.VersionOf(digest.HashOf(content)), hosts: len(entries)}
	s.bytes = weak.Make(newEncoded(nameOf(number), s.version, content))
	m.last[number] = made{entries, s}
	return s
}

// entriesOf returns the entries of the hosts that a viewer sees.
func entriesOf(v *hosts.Viewer, all []*hosts.Host) []*hosts.Entry {
	entries := make([]*hosts.Entry, 0, len(all))
	for _, h := range all {
		if e := v.Entry(h); e != nil {
			entries = append(entries, e)
		}
	}
	return entries
}

// contentOf returns the NameTable of entries.
func contentOf(entries []*hosts.Entry) []byte {
	size := 0
	for _, e := range entries {
		size += len(e.Encoded)
	}
	content := make([]byte, 0, size)
	for _, e := range entries {
		content = append(content, e.Encoded...)
	}
	return content
}

// nameOf returns the name of the resource of a shard.
func nameOf(number int) string { return strconv.Itoa(number) }

// same reports whether two shards have the same version; nil stands for no hosts.
func same(a, b *shard) bool { return a == b || a != nil && b != nil && a.version == b.version }

// A table says which hosts the clients with a view have at a time, by the versions of shards. Many sessions share it. It
// has no hosts, and no bytes, so a slow client keeps only versions. Nil is the empty table.
type table struct {
	base *[digest.Count]*shard // of all views with the same base
	own  map[int]*shard        // of this view, where it differs from the base
	once sync.Once             // sets text
	text string
}

// shard returns the shard with a number.
func (t *table) shard(number int) *shard {
	if t == nil {
		return nil
	}
	if s, found := t.own[number]; found {
		return s
	}
	return t.base[number]
}

// since returns the numbers of the shards that a client with the table old does not have, and of those that the client
// must remove.
func (t *table) since(old *table) (changed, removed []int) {
	if t == old {
		return nil, nil
	}
	for i := range digest.Count {
		switch s, has := t.shard(i), old.shard(i); {
		case same(s, has):
		case s == nil:
			removed = append(removed, i)
		default:
			changed = append(changed, i)
		}
	}
	return changed, removed
}

// equals reports whether two tables have the same hosts.
func (t *table) equals(other *table) bool {
	changed, removed := t.since(other)
	return len(changed)+len(removed) == 0
}

// hosts returns the number of hosts.
func (t *table) hosts() (n int) {
	for i := range digest.Count {
		if s := t.shard(i); s != nil {
			n += s.hosts
		}
	}
	return n
}

// digest returns the checksum of the table; "" for nil.
func (t *table) digest() string {
	if t == nil {
		return ""
	}
	t.once.Do(func() {
		t.text = digest.OfTable(func(yield func(name, version string) bool) {
			for i := range digest.Count {
				if s := t.shard(i); s != nil && !yield(nameOf(i), s.version) {
					return
				}
			}
		})
	})
	return t.text
}

// announced returns the table that a client says it has in its first request, and the names of other resources that it has.
// The table is nil if the client has none of its shards. The parameter now is the current table, whose shards are used
// where they are the same.
func announced(versions [][2][]byte, now *table) (t *table, others []string) {
	var other shard // with any other version
	for _, one := range versions {
		name := string(one[0])
		number, err := strconv.Atoi(name)
		if err != nil || number < 0 || number >= digest.Count || name != nameOf(number) {
			others = append(others, name)
			continue
		}
		if t == nil {
			t = &table{base: new([digest.Count]*shard)}
		}
		if t.base[number] = now.shard(number); t.base[number] == nil || t.base[number].version != string(one[1]) {
			t.base[number] = &other
		}
	}
	slices.Sort(others)
	return t, others
}

// A source has what the shards of a table are made of.
type source struct {
	hosts  *hosts.Shards
	viewer hosts.Viewer // of the view
	base   hosts.Viewer // at its base
}

// encoded returns the bytes of a shard of a table.
func (t *tables) encoded(of *source, from *table, number int) *encoded {
	s := from.shard(number)
	t.encoding.Lock()
	defer t.encoding.Unlock()
	e := s.bytes.Value()
	if e == nil {
		v := &of.base
		if _, own := from.own[number]; own {
			v = &of.viewer
		}
		e = newEncoded(nameOf(number), s.version, contentOf(entriesOf(v, of.hosts[number])))
		s.bytes = weak.Make(e)
	}
	return e
}
