package agent

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"

	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/table"
	"github.com/nametap/nametap/internal/httpguard"
)

// maxDumps is how many dumps may be written at the same time. A dump keeps its table in memory, even after a push has
// replaced the table.
const maxDumps = 2

// dumps limits how many long responses, which grow with the table or the cache, are written at a time. Each is
// written entry by entry, so the agent's memory does not grow with the response.
type dumps struct{ *httpguard.Dumps }

func newDumps() dumps { return dumps{httpguard.NewDumps(maxDumps, "the table or the cache")} }

// limited returns a handler that calls the function next. While maxDumps requests are answered, it refuses further
// requests.
func (d dumps) limited(next func(w *dump, r *http.Request)) http.HandlerFunc {
	return d.Limited(func(w *httpguard.Dump, r *http.Request) { next(&dump{Dump: w}, r) })
}

// A dump is one response.
type dump struct {
	*httpguard.Dump
	scratch bytes.Buffer // reused by the method entry
}

// text writes a part of the response.
func (d *dump) text(text string) { _, _ = io.WriteString(d, text) } // Write panics; it never returns an error

// entry writes one element of a list, or one member of an object. entry writes prefix, and then the JSON text in value,
// both indented by four spaces. first is true for the first element or member.
func (d *dump) entry(first bool, prefix string, value []byte) {
	separator := ",\n    "
	if first {
		separator = "\n    "
	}
	d.scratch.Reset()
	if err := json.Indent(&d.scratch, value, "    ", "  "); err != nil {
		panic(http.ErrAbortHandler) // never, for the output of an encoder
	}
	d.text(separator)
	d.text(prefix)
	_, _ = d.scratch.WriteTo(d) // Write panics; it never returns an error
}

// writeList writes the elements of a list in JSON.
func writeList[T table.Skipped | table.Collision | forward.CacheEntry](w *dump, list []T) {
	for i := range list {
		value, err := json.Marshal(list[i])
		if err != nil {
			panic(http.ErrAbortHandler) // never: the elements have only texts and numbers
		}
		w.entry(i == 0, "", value)
	}
}
