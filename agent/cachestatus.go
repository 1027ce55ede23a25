package agent

import (
	"net/http"

	"github.com/nametap/nametap/dnsproxy/forward"
)

// maxCacheEntries bounds what /debug/cache shows.
const maxCacheEntries = 10_000

// A Flushed says how many questions the cache has forgotten.
type Flushed struct {
	Flushed int `json:"flushed"`
}

// selection returns which questions of the cache a request is about.
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
