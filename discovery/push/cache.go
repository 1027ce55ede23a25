package push

// maxEncoded bounds encoded shards, and encoded resources, that are kept, in bytes, unless one alone is larger.
// Clients say which shards they have, so that there may be any number of resources.
const maxEncoded = 32 << 20

// A cache holds encoded bytes by what they are made from.
type cache[K comparable, V any] struct {
	encoded     map[K]V
	size, limit int // in bytes
	sizeOf      func(V) int
}

func newCache[K comparable, V any](limit int, sizeOf func(V) int) cache[K, V] {
	return cache[K, V]{encoded: map[K]V{}, limit: limit, sizeOf: func(v V) int { return sizeOf(v) + overhead }}
}

// overhead is what a cache needs for an element besides its bytes: many have few.
const overhead = 400

// add adds what was encoded. It drops others, in no order, if there are too many.
func (c *cache[K, V]) add(key K, v V) {
	c.size += c.sizeOf(v)
	for other := range c.encoded {
		if c.size <= c.limit {
			break
		}
		c.drop(other)
	}
	c.encoded[key] = v
}

func (c *cache[K, V]) drop(key K) {
	if old, found := c.encoded[key]; found {
		c.size -= c.sizeOf(old)
		delete(c.encoded, key)
	}
}

func (c *cache[K, V]) clear() {
	clear(c.encoded)
	c.size = 0
}
