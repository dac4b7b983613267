// Addresses are relative, so that the page also works behind a prefix.
SwaggerUIBundle({ url: "openapi.json", dom_id: "#api", deepLinking: true, validatorUrl: null });
