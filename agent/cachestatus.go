package agent

import (
	"net/http"

	"github.com/nametap/nametap/dnsproxy/forward"
)

// maxCacheEntries limits the entries that /debug/cache shows, and so the response to a few
// megabytes.
const maxCacheEntries = 10_000

// Flushed is the number of questions that were removed from the cache.
type Flushed struct {
	Flushed int `json:"flushed"`
}

// selection returns the questions that a request selects: those of a name, those below a
// suffix, or all.
func selection(r *http.Request) forward.CacheSelection {
	query := r.URL.Query()
	return forward.CacheSelection{Name: query.Get("name"), Suffix: query.Get("suffix")}
}

func (s *statusServer) handleCache(w http.ResponseWriter, r *http.Request) {
	content, err := s.agent.proxy.CacheContent(selection(r), maxCacheEntries)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	writeJSON(w, content)
}

func (s *statusServer) handleCacheFlush(w http.ResponseWriter, r *http.Request) {
	n, err := s.agent.proxy.FlushCache(selection(r))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	writeJSON(w, Flushed{Flushed: n})
}
