// Package choice parses settings that have one of a few values.
package choice

import (
	"errors"
	"slices"
	"strings"
)

// Parse sets value to text if text is one of values. Otherwise the error lists values; the caller adds the name of the
// setting and text.
func Parse[T ~string](value *T, text []byte, values ...T) error {
	if slices.Contains(values, T(text)) {
		*value = T(text)
		return nil
	}
	var names []string
	for _, v := range values {
		names = append(names, string(v))
	}
	last := len(names) - 1
	return errors.New("want " + strings.Join(names[:last], ", ") + " or " + names[last])
}
