package forward

import (
	"cmp"
	"fmt"
	"sort"
	"time"

	"github.com/nametap/nametap/dnsproxy/cache"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// A CacheSelection selects questions of the cache; the zero value selects all.
type CacheSelection struct {
	Name   string // the questions for this name
	Suffix string // the questions for this name and all names below it
}

// match returns a function that reports whether s selects a question.
func (s CacheSelection) match() (func(cache.Key) bool, error) {
	if s.Name != "" && s.Suffix != "" {
		return nil, fmt.Errorf("name %q and suffix %q: want one of them", s.Name, s.Suffix)
	}
	name, err := wire.ParseName(cmp.Or(s.Name, s.Suffix, "."))
	if err != nil {
		return nil, err
	}
	if s.Name == "" {
		return func(k cache.Key) bool { return wire.Name(k.Name).Below(name) }, nil
	}
	return func(k cache.Key) bool { return wire.Name(k.Name) == name }, nil
}

// A CacheEntry is what the cache has for a question.
type CacheEntry struct {
	Name    string `json:"name"`
	Type    string `json:"type"`
	Rcode   string `json:"rcode,omitempty"`   // empty if no nameserver answered
	Records int    `json:"records,omitempty"` // in the answer section
	Server  string `json:"server,omitempty"`  // the nameserver that sent the reply
	// TTL is the number of seconds until the reply expires. It is negative if the reply has expired.
	TTL     int    `json:"ttl"`
	Failure string `json:"failure,omitempty"` // why nameservers did not answer the last time
}

// A CacheContent is what the cache has.
type CacheContent struct {
	Total   int          `json:"total"`   // number of questions that were selected
	Entries []CacheEntry `json:"entries"` // some or all of these questions, sorted by name and type
}

// CacheContent returns what the cache has for the selected questions, up to limit of them.
func (f *Forwarder) CacheContent(selection CacheSelection, limit int) (CacheContent, error) {
	match, err := selection.match()
	if err != nil {
		return CacheContent{}, err
	}
	entries, total := f.cache.Entries(match, limit, f.clock.Now())
	content := CacheContent{Total: total, Entries: make([]CacheEntry, 0, len(entries))}
	for _, e := range entries {
		entry := CacheEntry{
			Name: wire.Name(e.Key.Name).String(), Type: wire.TypeName(e.Key.Type),
			Server: e.Server, Failure: e.Failure,
		}
		if e.Reply != nil {
			entry.Rcode, entry.Records = wire.RcodeName(e.Reply.Rcode()), e.Reply.Answers()
			entry.TTL = int(e.Left / time.Second)
		}
		content.Entries = append(content.Entries, entry)
	}
	all := content.Entries
	sort.Slice(all, func(i, j int) bool { return all[i].Name+" "+all[i].Type < all[j].Name+" "+all[j].Type })
	return content, nil
}
