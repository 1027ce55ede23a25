package push

// maxEncoded bounds the bytes of encoded shards that are kept. It also bounds the bytes of encoded resources,
// separately. A single shard or resource may be larger.
const maxEncoded = 32 << 20

// A cache holds encoded values, by keys that say from what they were made.
type cache[K comparable, V any] struct {
	encoded     map[K]V
	size, limit int // in bytes
	sizeOf      func(V) int
}

func newCache[K comparable, V any](limit int, sizeOf func(V) int) cache[K, V] {
	return cache[K, V]{encoded: map[K]V{}, limit: limit, sizeOf: func(v V) int { return sizeOf(v) + overhead }}
}

// overhead is about how many bytes a cache needs for an element, in addition to the element's own bytes. Many elements
// are smaller than that, so it is part of the size of each element.
const overhead = 400

// add adds an encoded value. If the cache would have too many bytes, add drops other values, in no particular order.
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
