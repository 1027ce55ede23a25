package auth

import "crypto/sha256"

// tokenKey is the digest of a token.
type tokenKey = [sha256.Size]byte

// A recent remembers the good tokens that were used last: at least maxGood, and at most twice as many. Each operation takes
// constant time. The caller needs a lock.
type recent struct {
	// Tokens are put into young when they are used. When young has maxGood of them, it becomes aged, and a new, empty young
	// takes its place.
	young, aged map[tokenKey]good
}

// get returns what is known of a token.
func (r *recent) get(key tokenKey) (value good, ok bool) {
	if value, ok = r.young[key]; ok {
		return value, true
	}
	if value, ok = r.aged[key]; ok {
		r.put(key, value)
	}
	return value, ok
}

// put remembers a token.
func (r *recent) put(key tokenKey, value good) {
	if _, ok := r.young[key]; !ok && len(r.young) >= maxGood || r.young == nil {
		r.aged, r.young = r.young, map[tokenKey]good{}
	}
	r.young[key] = value
}

// remove forgets a token.
func (r *recent) remove(key tokenKey) {
	delete(r.young, key)
	delete(r.aged, key)
}
