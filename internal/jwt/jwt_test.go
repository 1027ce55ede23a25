package jwt

import (
	"encoding/base64"
	"fmt"
	"testing"
	"time"
)

// C1, D49: a claim after the year 9999 says nothing about the token: it is in milliseconds, or the token does not expire.
func TestTimes(t *testing.T) {
	for claim, want := range map[string]time.Time{
		"1700000000": time.Unix(1700000000, 0), "1.7e9": time.Unix(1700000000, 0), "253402300799": time.Unix(253402300799, 0),
		"0": {}, "-5": {}, "1700000000000": {}, "1e19": {}, "1e300": {}, `"1700000000"`: {},
	} {
		payload := fmt.Sprintf(`{"iat": %s, "exp": %s}`, claim, claim)
		issued, expires := Times("e30." + base64.RawURLEncoding.EncodeToString([]byte(payload)) + ".c2ln")
		if !issued.Equal(want) || !expires.Equal(want) {
			t.Errorf("%s: %v and %v, want %v", claim, issued, expires, want)
		}
	}
}
