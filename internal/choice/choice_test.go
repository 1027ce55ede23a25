package choice_test

import (
	"testing"

	"github.com/nametap/nametap/internal/choice"
)

type color string

func TestParse(t *testing.T) {
	t.Parallel()
	value := color("red")
	if err := choice.Parse(&value, []byte("blue"), "red", "green", "blue"); err != nil || value != "blue" {
		t.Errorf("got %q, %v", value, err)
	}
	if err := choice.Parse(&value, []byte("black"), "red", "green", "blue"); err == nil || err.Error() != "want red, green or blue" || value != "blue" {
		t.Errorf("got %q, %v", value, err)
	}
	if err := choice.Parse(&value, nil, "on", "off"); err == nil || err.Error() != "want on or off" {
		t.Errorf("got %v", err)
	}
}
