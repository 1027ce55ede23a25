package auth

import "crypto/sha256"

// tokenKey is the digest of a token.
type tokenKey = [sha256.Size]byte

// A recent remembers a value for each of the tokens that were used last. The number of these tokens is at least the
// field max, and at most twice that. Each operation takes constant time. The caller needs a lock.
type recent[V any] struct {
	max int
	// Values are put into young when they are used. When young has max values, it becomes aged, and a new, empty young
	// takes its place.
	young, aged map[tokenKey]V
}

// get returns the value of a token.
func (r *recent[V]) get(key tokenKey) (value V, ok bool) {
	if value, ok = r.young[key]; ok {
		return value, true
	}
	if value, ok = r.aged[key]; ok {
		r.put(key, value)
	}
	return value, ok
}

// put remembers the value of a token.
func (r *recent[V]) put(key tokenKey, value V) {
	if _, ok := r.young[key]; !ok && len(r.young) >= r.max || r.young == nil {
		r.aged, r.young = r.young, map[tokenKey]V{}
	}
	r.young[key] = value
}

// remove forgets the value of a token.
func (r *recent[V]) remove(key tokenKey) {
	delete(r.young, key)
	delete(r.aged, key)
}
